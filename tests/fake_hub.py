"""A Hub on 127.0.0.1, as far as an upload needs one: repositories, branches, and commits of small and large files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

LARGE = (".safetensors", ".bin")


@dataclass
class Hub:
    """What the Hub holds, and all that it was sent."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # by repository
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)  # by repository and branch
    commits: list[str] = field(default_factory=list)  # their messages
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by digest
    authorizations: set[str] = field(default_factory=set)
    received: list[bytes] = field(default_factory=list)  # every request but its Authorization header
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)  # a part of a path -> status and message
    warnings: list[str] = field(default_factory=list)  # on a README


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """A Hub that runs meanwhile."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Not to stderr."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._record(body)
        for part, (status, message) in self.hub.refuse.items():
            if part in self.path:
                self._send(status, {"error": message}, message)
                return
        self._send(*self._content(unquote(self.path.partition("?")[0]), body))

    do_GET = do_POST = do_PUT = _answer

    def _record(self, body: bytes) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "authorization"}
        if "Authorization" in self.headers:
            self.hub.authorizations.add(self.headers["Authorization"])
        self.hub.received.append(f"{self.command} {self.path} {headers}".encode() + body)

    def _content(self, path: str, body: bytes) -> tuple[int, object]:
        hub = self.hub
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": [{"message": each} for each in hub.warnings]}
        if path.startswith("/large/"):
            hub.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._place(each) for each in json.loads(body)["objects"]]}
        if not path.startswith("/api/models/"):
            return 404, {"error": "there is no such page"}
        _, _, _, owner, name, *rest = path.split("/")
        repository = f"{owner}/{name}"
        if repository not in hub.private:
            return 404, {"error": "Repository not found"}
        if not rest or rest[0] == "revision":
            return 200, {"id": repository, "private": hub.private[repository], "sha": "0" * 40, "siblings": []}
        if rest[0] == "branch":
            new = (repository, "/".join(rest[1:]))
            if new in hub.files:
                return 409, {"error": "exists"}
            hub.files[new] = dict(hub.files[repository, "main"])
            return 200, {}
        if rest[0] == "preupload":
            mode = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {"path": path, "uploadMode": mode[path.endswith(LARGE)], "shouldIgnore": False, "oid": None}
                    for path in (each["path"] for each in json.loads(body)["files"])
                ]
            }
        if rest[0] == "xet-write-token":
            return 404, {"error": "there is no xet here"}
        assert rest[0] == "commit", path
        return self._commit(repository, "/".join(rest[1:]), body)

    def _create(self, asked: dict[str, Any]) -> tuple[int, object]:
        repository = f"{asked['organization']}/{asked['name']}"
        told = {"url": f"{self.hub.url}/{repository}"}
        if repository in self.hub.private:
            return 409, {**told, "error": "You already created this model repo"}
        self.hub.private[repository] = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.files[repository, "main"] = {}
        return 200, told

    def _place(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.hub.url}/large/{asked['oid']}", "header": {}}
        return {"oid": asked["oid"], "size": asked["size"], "actions": {"upload": upload}}

    def _commit(self, repository: str, branch: str, body: bytes) -> tuple[int, object]:
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif line["key"] == "file":
                self.hub.files[repository, branch][value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                content = self.hub.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                self.hub.files[repository, branch][value["path"]] = content
        return 200, {"commitUrl": f"{self.hub.url}/{repository}/commit/1234", "commitOid": "1" * 40}

    def _send(self, status: int, content: object, message: str | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if message is not None:
            self.send_header("X-Error-Message", message)
        self.end_headers()
        self.wfile.write(body)
