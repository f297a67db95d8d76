"""As much of Ray as a team needs, without a cluster: an actor is an object here, and a call to it a thread."""

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait as wait_for
from pathlib import Path
from types import SimpleNamespace


class RayError(Exception):
    pass


class Ray:
    """Stand for the module. machines: the resources of each; is_begun: by the program that uses brim."""

    __version__ = "0"
    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, *machines, is_begun=False, refuses="", begun_elsewhere=False):
        self.machines, self.is_begun, self.refuses = machines, is_begun, refuses
        self.inits, self.options, self.killed, self.pools = [], [], [], {}
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.9" if begun_elsewhere else "127.0.0.1")

    def init(self, **how):
        if self.refuses:
            raise ConnectionError(self.refuses)
        self.inits.append((how, os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")))
        self.is_begun = True
        if how["address"] == "local":
            assert Path(how["_temp_dir"]).parent.is_dir()
            self.machines = ({"CPU": how["num_cpus"]},)

    def is_initialized(self):
        return self.is_begun

    def shutdown(self):
        self.is_begun = False

    def nodes(self):
        return [{"Alive": True, "Resources": machine} for machine in self.machines]

    def cluster_resources(self):
        return {"GPU": sum(machine.get("GPU", 0) for machine in self.machines)}

    available_resources = cluster_resources

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="127.0.0.1:6379" if self.inits else "10.0.0.1:6379")

    def remote(self, cls):
        def made(*arguments):
            pool = ThreadPoolExecutor(self.options[-1]["max_concurrency"])
            actor = pool.submit(cls, *arguments)
            handle = _Handle(lambda name, *given: pool.submit(lambda: getattr(actor.result(), name)(*given)))
            self.pools[handle] = pool
            return handle

        def options(**how):
            self.options.append(how)
            return SimpleNamespace(remote=made)

        return SimpleNamespace(options=options)

    def wait(self, calls, *, num_returns=1, timeout):
        found = wait_for(calls, timeout, FIRST_COMPLETED if num_returns == 1 else "ALL_COMPLETED")
        return list(found.done), list(found.not_done)

    def get(self, call):
        return call.result()

    def kill(self, handle):
        self.killed.append(handle)
        self.pools.pop(handle).shutdown(wait=False)


class _Handle:
    def __init__(self, call):
        self._call = call

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: self._call(name, *given))
