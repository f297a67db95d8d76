from .stream import Offload as Offload, ShardedStream as ShardedStream, Sharding as Sharding, shard as shard
