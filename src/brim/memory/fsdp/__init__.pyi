from .stream import ShardedStream as ShardedStream, Sharding as Sharding, shard as shard
from .units import OnHost as OnHost
