from .stream import OnHost as OnHost, ShardedStream as ShardedStream, Sharding as Sharding, shard as shard
