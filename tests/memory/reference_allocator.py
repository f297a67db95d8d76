"""A second implementation of the allocator's rules, slow and plain: lists of blocks, every search a scan.

It follows the structure of c10/cuda/CUDACachingAllocator.cpp (blocks with neighbours, free ones by pool), where the
simulation under test has boundary tags and sorted keys. Tests compare the two over random sequences.
"""

MIB = 2**20


class OutOfMemory(Exception):
    pass


class Block:
    def __init__(self, address, size, pool, *, segment=None, grows=None, mapped=True):
        self.address, self.size, self.pool, self.grows, self.mapped = address, size, pool, grows, mapped
        self.segment = [self] if segment is None else segment  # its blocks, in the order of their addresses
        self.used = False
        self.born = 0

    def is_part(self):
        return len(self.segment) > 1

    def after(self):
        return next(iter(self.segment[self.segment.index(self) + 1 :]), None)

    def split(self, size):
        """Keep the first `size` bytes, and return a block of the others."""
        alike = {"segment": self.segment, "grows": self.grows, "mapped": self.mapped}
        rest = Block(self.address + size, self.size - size, self.pool, **alike)
        self.segment.insert(self.segment.index(self) + 1, rest)
        self.size = size
        return rest


class Pool:
    def __init__(self, small):
        self.small = small
        self.cached = []
        self.unmapped = []
        self.clock = 0


class ReferenceAllocator:
    def __init__(
        self, *, expandable=False, large=20 * MIB, max_split=None, slack=20 * MIB, threshold=0.0, fraction=1.0,
        capacity=None, round_size=None,
    ):  # fmt: skip
        self.expandable, self.large, self.max_split, self.slack = expandable, large, max_split, slack
        self.threshold, self.capacity = threshold, capacity
        self.allowed = int(fraction * capacity) if fraction < 1 else None
        self.round_size = round_size or (lambda n: max(512, -(-n // 512) * 512))
        self.pools = {}
        self.clocks = {False: 0, True: 0}
        self.next = 512
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0

    def malloc(self, num_bytes, stream=0):
        size = self.round_size(num_bytes)
        pool = self.pools.setdefault((stream, size <= MIB), Pool(size <= MIB))
        block = self.cached_block(pool, size)
        if block is None:
            if self.collecting():
                self.collect()
            block = self.fresh_block(pool, size)
            if block is None and self.release_oversize(pool, size):
                block = self.fresh_block(pool, size)
            if block is None:
                self.empty_cache()
                self.retries += 1
                block = self.fresh_block(pool, size)
            if block is None:
                raise OutOfMemory
        if self.splits(block, size):
            self.cache(block.split(size))
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block):
        self.allocated -= block.size
        block.used = False
        self.join(block)
        self.cache(block)

    def empty_cache(self):
        for pool in list(self.pools.values()):
            grown = [block for block in pool.cached if block.grows is not None]
            for block in [block for block in pool.cached if block.grows is None and not block.is_part()]:
                self.give_back(block)
            for block in grown:
                self.unmap(block)

    # finding

    def cached_block(self, pool, size):
        if self.collecting():
            self.clocks[pool.small] += 1
        fits = sorted((block for block in pool.cached if block.size >= size), key=lambda b: (b.size, b.address))
        if not fits:
            return None
        index = 0
        while index + 1 < len(fits) and fits[index].grows and self.reach(fits[index + 1]) < self.reach(fits[index]):
            index += 1
        block = fits[index]
        if self.max_split is not None:
            if size < self.max_split and block.size >= self.max_split:
                return None
            if size >= self.max_split and block.size >= size + self.slack:
                return None
        pool.cached.remove(block)
        return block

    @staticmethod
    def reach(block):
        after = block.after()
        return block.size + (after.size if after is not None and not after.mapped else 0)

    def fresh_block(self, pool, size):
        wanted = 2 * MIB if size <= MIB else self.large if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        if self.expandable:
            return self.grown_block(pool, size)
        if self.capacity is not None and self.reserved + wanted > self.capacity:
            return None
        self.reserve(wanted)
        self.next += wanted + 4 * MIB
        return Block(self.next - wanted - 4 * MIB, wanted, pool)

    def splits(self, block, size):
        rest = block.size - size
        if block.pool.small or self.expandable:
            return rest >= 512
        return (self.max_split is None or size < self.max_split) and rest > MIB

    # growing

    def grown_block(self, pool, size):
        block = self.room(pool, size)
        if not block.mapped and not self.map(block, min(block.size, size)):
            return None
        while block.size < size:
            hole = block.after()
            if not self.map(hole, min(size - block.size, hole.size)):
                return None
            block = hole
        pool.cached.remove(block)
        return block

    def room(self, pool, size):
        for hole in sorted(pool.unmapped, key=lambda b: b.address):
            at = hole.segment.index(hole)
            start = at - 1 if at and not hole.segment[at - 1].used else at
            total = 0
            for block in hole.segment[start:]:
                if total >= size or block.used:
                    break
                total += block.size
            if total >= size:
                return hole.segment[start]
        page = 2 * MIB if pool.small else self.large
        space = -(-(self.capacity * 9 // 8 if self.capacity else 2**50) // page) * page
        hole = Block(self.next, space, pool, grows=(self.next, page), mapped=False)
        self.next += space + 4 * MIB
        pool.unmapped.append(hole)
        return hole

    def map(self, hole, size):
        _, page = hole.grows
        pages = -(-size // page)
        if self.capacity is not None and self.reserved + pages * page > self.capacity:
            return False
        hole.pool.unmapped.remove(hole)
        if pages * page < hole.size:
            hole.pool.unmapped.append(hole.split(pages * page))
        hole.mapped = True
        self.join(hole)
        self.cache(hole)
        self.reserve(pages * page)
        return True

    def unmap(self, block):
        base, page = block.grows
        first = base + -(-(block.address - base) // page) * page
        last = base + (block.address + block.size - base) // page * page
        if first >= last:
            return
        block.pool.cached.remove(block)
        if last < block.address + block.size:
            self.cache(block.split(last - block.address))
        if block.address < first:
            self.cache(block)
            block = block.split(first - block.address)
        block.mapped = False
        self.reserved -= block.size
        self.join(block)
        if block.is_part():
            block.pool.unmapped.append(block)

    # giving back

    def release_oversize(self, pool, size):
        if self.max_split is None or self.expandable:
            return False
        needed = max(size, self.max_split)
        fits = sorted((block for block in pool.cached if block.size >= needed), key=lambda b: (b.size, b.address))
        if fits:
            self.give_back(fits[0])
            return True
        released = 0
        for block in sorted(pool.cached, key=lambda b: (-b.size, -b.address)):
            if released >= needed or block.size < self.max_split:
                break
            released += block.size
            self.give_back(block)
        return released >= needed

    def collecting(self):
        return self.threshold > 0 and self.allowed is not None

    def collect(self):
        target = self.reserved - int(self.threshold * self.allowed)
        if target <= 0:
            return
        whole = [b for pool in self.pools.values() if not pool.small for b in pool.cached if not b.is_part()]
        reclaimed, found = 0, True
        while whole and reclaimed < target and found:
            mean = sum(self.age(block) for block in whole) / len(whole)
            found = False
            for block in list(whole):
                if self.age(block) >= mean:
                    found = True
                    reclaimed += block.size
                    whole.remove(block)
                    self.give_back(block)

    def age(self, block):
        return self.clocks[False] - block.born

    def give_back(self, block):
        block.pool.cached.remove(block)
        self.reserved -= block.size

    # bookkeeping

    def cache(self, block):
        block.born = self.clocks[block.pool.small]
        block.pool.cached.append(block)

    def reserve(self, num_bytes):
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def join(self, block):
        at = block.segment.index(block)
        for other in (*block.segment[max(at - 1, 0) : at], *block.segment[at + 1 : at + 2]):
            if not other.used and other.mapped == block.mapped:
                (block.pool.cached if other.mapped else block.pool.unmapped).remove(other)
                block.segment.remove(other)
                block.address, block.size = min(block.address, other.address), block.size + other.size
