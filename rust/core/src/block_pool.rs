//! All KV blocks: who references them, in which order the free ones are handed out, and which
//! prefix each one caches. Mirrors vLLM's `v1/core/block_pool.py` and `FreeKVCacheBlockQueue`.
//!
//! Everything lives in tables by block id, allocated when the pool is built: the free queue and the
//! blocks that share a hash are lists threaded through them, and the index of the prefix cache
//! holds block ids only. A block has a second key where hits may end within it: once it is full, the
//! end of a prompt within it can still be found. Such keys are entries behind those of the blocks.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::block_hash::{BlockHash, HashWords};
use crate::ids::{BlockId, GroupId};
use crate::journal::{Entry as JournalEntry, Journal, JournalConfig};

/// Stands for 'no block' in the threaded lists; the pool is smaller than this.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Block {
    /// Requests that have this block in a table.
    ref_cnt: u32,
    /// Neighbours in the free queue; [`NONE`] at its ends and while the block is in use.
    prev_free: u32,
    next_free: u32,
}

/// What blocks cache, a column a property. All of it begins as zeros, so that the operating system
/// provides its memory only as blocks come to be cached: a large pool is there at once.
#[derive(Clone, Debug)]
struct Contents {
    /// Tokens of the prefix that the hash stands for; 0 while the block is not cached, and then
    /// the other columns mean nothing.
    num_tokens: Vec<u32>,
    hash: Vec<HashWords>,
    group: Vec<u32>,
    /// Neighbours among the blocks with the same hash, as a ring: a lone block is its own.
    prev_same: Vec<u32>,
    next_same: Vec<u32>,
    /// The first of a block's further keys: an entry behind those of the blocks, or 0.
    first_extra: Vec<u32>,
    /// Whose further key an entry is, and the next one of that block, or 0.
    extras: Vec<Extra>,
    /// Entries of `extras` that are nobody's.
    free_extras: Vec<u32>,
}

/// A further key of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Extra {
    owner: u32,
    next: u32,
}

impl Contents {
    fn new(num_blocks: usize) -> Self {
        Self {
            first_extra: vec![0; num_blocks],
            extras: Vec::new(),
            free_extras: Vec::new(),
            num_tokens: vec![0; num_blocks],
            hash: vec![HashWords::default(); num_blocks],
            group: vec![0; num_blocks],
            prev_same: vec![0; num_blocks],
            next_same: vec![0; num_blocks],
        }
    }

    fn is_cached(&self, id: u32) -> bool {
        self.num_tokens[id as usize] > 0
    }

    fn is_keyed(&self, id: u32, hash: &BlockHash, group: GroupId) -> bool {
        self.group[id as usize] == group.0 && self.hash[id as usize] == hash.to_words()
    }

    fn key(&self, id: u32) -> (BlockHash, GroupId) {
        (BlockHash::from_words(self.hash[id as usize]), GroupId(self.group[id as usize]))
    }

    /// The block that an entry is a key of.
    fn owner(&self, entry: u32) -> u32 {
        let num_blocks = self.first_extra.len();
        if (entry as usize) < num_blocks {
            return entry;
        }
        self.extras[entry as usize - num_blocks].owner
    }

    /// A new entry for a further key of a block.
    fn add_extra(&mut self, id: u32) -> u32 {
        let num_blocks = self.first_extra.len();
        let extra = Extra { owner: id, next: self.first_extra[id as usize] };
        let entry = self.free_extras.pop().unwrap_or((num_blocks + self.extras.len()) as u32);
        if entry as usize == num_blocks + self.extras.len() {
            self.extras.push(extra);
            let num_entries = num_blocks + self.extras.len();
            self.num_tokens.resize(num_entries, 0);
            self.hash.resize(num_entries, HashWords::default());
            self.group.resize(num_entries, 0);
            self.prev_same.resize(num_entries, 0);
            self.next_same.resize(num_entries, 0);
        } else {
            self.extras[entry as usize - num_blocks] = extra;
        }
        self.first_extra[id as usize] = entry;
        entry
    }

    /// Takes a block's further keys from it: in which order does not matter.
    fn take_extra(&mut self, id: u32) -> Option<u32> {
        let entry = self.first_extra[id as usize];
        let at = (entry as usize).checked_sub(self.first_extra.len())?;
        self.first_extra[id as usize] = self.extras[at].next;
        self.free_extras.push(entry);
        Some(entry)
    }

    /// A block's further keys.
    fn extras_of(&self, id: u32) -> impl Iterator<Item = u32> {
        let mut next = self.first_extra[id as usize];
        std::iter::from_fn(move || {
            let entry = next;
            next = self.extras.get((entry as usize).checked_sub(self.first_extra.len())?)?.next;
            Some(entry)
        })
    }

    fn clear(&mut self) {
        self.num_tokens.fill(0);
        if !self.extras.is_empty() {
            self.first_extra.fill(0);
            self.free_extras.clear();
            self.free_extras
                .extend((0..self.extras.len()).map(|at| (self.first_extra.len() + at) as u32));
        }
    }

    /// Adds a block at the end of the ring that begins with `first`, which may be itself.
    fn link_same(&mut self, first: u32, id: u32) {
        let last = if first == id { id } else { self.prev_same[first as usize] };
        self.prev_same[id as usize] = last;
        self.next_same[id as usize] = first;
        self.next_same[last as usize] = id;
        self.prev_same[first as usize] = id;
    }

    fn unlink_same(&mut self, id: u32) {
        let (prev, next) = (self.prev_same[id as usize], self.next_same[id as usize]);
        self.next_same[prev as usize] = next;
        self.prev_same[next as usize] = prev;
    }
}

/// The pool. A block is *free* while nobody references it, and stays *cached* until it is handed
/// out again.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    contents: Contents,
    free_head: u32,
    free_tail: u32,
    num_free: u32,
    /// Finds the first cached of the blocks that share a hash and a group.
    cached: HashTable<u32>,
    /// Whether blocks keep their hash when they are freed.
    enable_caching: bool,
    /// What happens to the blocks, as far as somebody asked.
    pub(crate) journal: Journal,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included, all others free in ascending order.
    ///
    /// # Panics
    /// If there is not even a null block, or more than 2^32 - 2.
    pub fn new(num_blocks: u32, enable_caching: bool, journal: JournalConfig) -> Self {
        assert!((1..NONE).contains(&num_blocks), "a pool has 1 to 2^32 - 2 blocks");
        let free = 1..num_blocks;
        let neighbour = |id: u32| if free.contains(&id) { id } else { NONE };
        let blocks = (0..num_blocks).map(|id| Block {
            ref_cnt: 0,
            prev_free: if id == 0 { NONE } else { neighbour(id - 1) },
            next_free: if id == 0 { NONE } else { neighbour(id + 1) },
        });
        Self {
            blocks: blocks.collect(),
            contents: Contents::new(num_blocks as usize),
            free_head: neighbour(1),
            free_tail: neighbour(num_blocks - 1),
            num_free: num_blocks - 1,
            cached: HashTable::with_capacity(if enable_caching { num_blocks as usize } else { 0 }),
            enable_caching,
            journal: Journal::new(journal),
        }
    }

    /// Blocks in the pool, the null block included.
    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub fn num_free(&self) -> u32 {
        self.num_free
    }

    /// Share of the blocks in use, 0 to 1; the null block does not count. `None` if there are no
    /// others.
    pub fn usage(&self) -> Option<f64> {
        let total = self.num_blocks() - 1;
        (total > 0).then(|| 1.0 - f64::from(self.num_free) / f64::from(total))
    }

    pub fn ref_count(&self, id: BlockId) -> u32 {
        self.blocks[id.index()].ref_cnt
    }

    /// Tokens of the prefix that the block is cached for, or 0.
    pub fn hash_num_tokens(&self, id: BlockId) -> u32 {
        self.contents.num_tokens[id.index()]
    }

    pub fn key_of(&self, id: BlockId) -> Option<(BlockHash, GroupId)> {
        self.contents.is_cached(id.0).then(|| self.contents.key(id.0))
    }

    /// Whether allocating the block to one more request takes it out of the free queue.
    pub fn is_evictable(&self, id: BlockId) -> bool {
        !id.is_null() && self.blocks[id.index()].ref_cnt == 0
    }

    /// The block that was cached first for this prefix in this group.
    pub fn find_cached(&self, hash: &BlockHash, group: GroupId) -> Option<BlockId> {
        let is_it = |&id: &u32| self.contents.is_keyed(id, hash, group);
        self.cached.find(table_hash(hash, group), is_it).map(|&id| BlockId(self.contents.owner(id)))
    }

    /// Hands out `count` free blocks, oldest first, and appends them to `table`. What they cached
    /// is forgotten.
    ///
    /// # Panics
    /// If fewer are free: callers check first.
    pub fn allocate(&mut self, count: u32, table: &mut Vec<BlockId>) {
        assert!(count <= self.num_free, "{count} blocks wanted, {} are free", self.num_free);
        for _ in 0..count {
            let id = self.free_head;
            self.unlink_free(id);
            self.evict(BlockId(id));
            let block = &mut self.blocks[id as usize];
            debug_assert_eq!(block.ref_cnt, 0, "a free block has no owner");
            block.ref_cnt = 1;
            self.journal.note_use(JournalEntry::Allocated(BlockId(id)));
            table.push(BlockId(id));
        }
    }

    /// Adds an owner to each block; the null block has none.
    pub fn touch(&mut self, ids: &[BlockId]) {
        for &id in ids.iter().filter(|id| !id.is_null()) {
            if self.blocks[id.index()].ref_cnt == 0 {
                self.unlink_free(id.0);
            }
            self.blocks[id.index()].ref_cnt += 1;
            self.journal.note_use(JournalEntry::Accessed(id));
        }
    }

    /// Takes an owner from each block. Those that nobody references any more become free: blocks
    /// without a hash are handed out next, in the order given; cached ones last.
    pub fn release(&mut self, ids: impl Iterator<Item = BlockId>) {
        // Blocks without a hash go in front of what was at the head when the call began.
        let mut insert_after = NONE;
        for id in ids.filter(|id| !id.is_null()) {
            let block = &mut self.blocks[id.index()];
            debug_assert!(block.ref_cnt > 0, "block {} is released twice", id.0);
            block.ref_cnt -= 1;
            if block.ref_cnt > 0 {
                continue;
            }
            if !self.enable_caching || !self.contents.is_cached(id.0) {
                self.link_free_after(insert_after, id.0);
                insert_after = id.0;
            } else {
                self.link_free_after(self.free_tail, id.0);
            }
        }
    }

    /// Makes a full block findable as the end of a prefix of `num_tokens` tokens.
    pub fn cache(&mut self, id: BlockId, hash: &BlockHash, group: GroupId, num_tokens: u32) {
        debug_assert!(!id.is_null() && num_tokens > 0);
        debug_assert!(!self.contents.is_cached(id.0), "block {} is cached already", id.0);
        self.insert_key(id.0, hash, group, num_tokens);
    }

    /// Makes a block findable by one key more.
    pub(crate) fn add_key(&mut self, id: BlockId, hash: &BlockHash, group: GroupId, tokens: u32) {
        let is_first = !self.contents.is_cached(id.0);
        let entry = if is_first { id.0 } else { self.contents.add_extra(id.0) };
        self.insert_key(entry, hash, group, tokens);
    }

    fn insert_key(&mut self, entry: u32, hash: &BlockHash, group: GroupId, num_tokens: u32) {
        self.contents.hash[entry as usize] = hash.to_words();
        self.contents.group[entry as usize] = group.0;
        self.contents.num_tokens[entry as usize] = num_tokens;

        let contents = &self.contents;
        let slot = self.cached.entry(
            table_hash(hash, group),
            |&other| contents.is_keyed(other, hash, group),
            |&other| {
                let (hash, group) = contents.key(other);
                table_hash(&hash, group)
            },
        );
        let first = match slot {
            Entry::Vacant(vacant) => *vacant.insert(entry).get(),
            Entry::Occupied(occupied) => *occupied.get(),
        };
        self.contents.link_same(first, entry);
    }

    pub(crate) fn has_key(&self, id: BlockId, hash: &BlockHash, group: GroupId) -> bool {
        let contents = &self.contents;
        contents.is_cached(id.0)
            && (contents.is_keyed(id.0, hash, group)
                || contents.extras_of(id.0).any(|entry| contents.is_keyed(entry, hash, group)))
    }

    /// Has one block be found in the place of another.
    pub(crate) fn move_keys(&mut self, from: BlockId, to: BlockId) {
        let num_tokens = self.contents.num_tokens[from.index()];
        if num_tokens == 0 {
            return;
        }
        let mut entry = Some(from.0);
        while let Some(at) = entry {
            let (hash, group) = self.contents.key(at);
            self.remove_key(at);
            self.add_key(to, &hash, group, num_tokens);
            entry = self.contents.take_extra(from.0);
        }
    }

    /// Adds an owner to a block that has one.
    pub(crate) fn add_owner(&mut self, id: BlockId) {
        debug_assert!(self.blocks[id.index()].ref_cnt > 0, "block {} is free", id.0);
        self.blocks[id.index()].ref_cnt += 1;
    }

    /// Forgets all that is cached, if every block is free. Returns whether it was.
    pub fn reset_cache(&mut self) -> bool {
        if self.num_free != self.num_blocks() - 1 {
            return false;
        }
        self.cached.clear();
        self.contents.clear();
        self.journal.note_use(JournalEntry::Reset);
        self.journal.note_prefix(|| JournalEntry::Cleared);
        true
    }

    /// The free blocks in the order in which they will be handed out.
    pub fn free_blocks(&self) -> impl Iterator<Item = BlockId> {
        let mut next = self.free_head;
        std::iter::from_fn(move || {
            let id = (next != NONE).then_some(next)?;
            next = self.blocks[id as usize].next_free;
            Some(BlockId(id))
        })
    }

    /// Every cached block with its hash and group, by ascending id.
    pub fn cached_blocks(&self) -> impl Iterator<Item = (BlockId, BlockHash, GroupId)> {
        let cached = (0..self.num_blocks()).filter(|&id| self.contents.is_cached(id));
        cached.map(|id| {
            let (hash, group) = self.contents.key(id);
            (BlockId(id), hash, group)
        })
    }

    /// Every further key of a block, by ascending id of the block.
    pub fn further_keys(&self) -> impl Iterator<Item = (BlockId, BlockHash, GroupId)> {
        let blocks = if self.contents.extras.is_empty() { 0 } else { self.num_blocks() };
        let entries =
            (0..blocks).flat_map(|id| self.contents.extras_of(id).map(move |it| (id, it)));
        entries.map(|(id, entry)| {
            let (hash, group) = self.contents.key(entry);
            (BlockId(id), hash, group)
        })
    }

    /// Removes the block from the prefix cache, if it is there.
    pub(crate) fn evict(&mut self, id: BlockId) {
        if self.enable_caching {
            self.journal.note_use(JournalEntry::Evicted(id));
        }
        self.forget(id);
    }

    /// Removes a block's keys, if it has any. Nobody is told that the block is used.
    pub(crate) fn forget(&mut self, id: BlockId) {
        let id = id.0;
        if !self.contents.is_cached(id) {
            return;
        }
        let mut entry = Some(id);
        while let Some(at) = entry {
            let (hash, group) = self.contents.key(at);
            self.journal.note_prefix(|| JournalEntry::Removed { hash, group });
            self.remove_key(at);
            entry = self.contents.take_extra(id);
        }
    }

    fn remove_key(&mut self, entry: u32) {
        let (hash, group) = self.contents.key(entry);
        let next = self.contents.next_same[entry as usize];
        let is_it = |&other: &u32| self.contents.is_keyed(other, &hash, group);
        let slot = self.cached.find_entry(table_hash(&hash, group), is_it);
        let slot = slot.expect("a cached block is in the index");
        if next == entry {
            slot.remove();
        } else if *slot.get() == entry {
            *slot.into_mut() = next;
        }
        self.contents.unlink_same(entry);
        self.contents.num_tokens[entry as usize] = 0;
    }

    fn unlink_free(&mut self, id: u32) {
        let Block { prev_free, next_free, .. } = self.blocks[id as usize];
        match prev_free {
            NONE => self.free_head = next_free,
            prev => self.blocks[prev as usize].next_free = next_free,
        }
        match next_free {
            NONE => self.free_tail = prev_free,
            next => self.blocks[next as usize].prev_free = prev_free,
        }
        let block = &mut self.blocks[id as usize];
        (block.prev_free, block.next_free) = (NONE, NONE);
        self.num_free -= 1;
    }

    /// Puts a block into the free queue behind `prev`, or first if that is [`NONE`].
    fn link_free_after(&mut self, prev: u32, id: u32) {
        let next = match prev {
            NONE => std::mem::replace(&mut self.free_head, id),
            prev => std::mem::replace(&mut self.blocks[prev as usize].next_free, id),
        };
        match next {
            NONE => self.free_tail = id,
            next => self.blocks[next as usize].prev_free = id,
        }
        let block = &mut self.blocks[id as usize];
        (block.prev_free, block.next_free) = (prev, next);
        self.num_free += 1;
    }

    /// Walks everything and panics at the first contradiction. For tests.
    ///
    /// # Panics
    /// If the pool contradicts itself.
    pub fn check_invariants(&self) {
        let mut num_free = 0;
        let mut prev = NONE;
        for id in self.free_blocks() {
            let block = &self.blocks[id.index()];
            assert!(!id.is_null() && block.ref_cnt == 0, "block {} can't be free", id.0);
            assert_eq!(block.prev_free, prev, "the free queue is broken at block {}", id.0);
            prev = id.0;
            num_free += 1;
            assert!(num_free <= self.num_free, "the free queue is longer than its count");
        }
        assert_eq!(prev, self.free_tail);
        assert_eq!(num_free, self.num_free);
        let num_used = self.blocks[1..].iter().filter(|block| block.ref_cnt > 0).count();
        assert_eq!(num_used + num_free as usize + 1, self.blocks.len(), "a block is lost");

        let mut num_indexed = 0;
        for &first in &self.cached {
            let mut id = first;
            loop {
                assert!(self.contents.is_cached(id), "block {id} is indexed but not cached");
                let next = self.contents.next_same[id as usize];
                assert_eq!(self.contents.prev_same[next as usize], id);
                num_indexed += 1;
                id = next;
                if id == first {
                    break;
                }
            }
        }
        let num_keys = self.cached_blocks().count() + self.further_keys().count();
        assert_eq!(num_indexed, num_keys, "a cached block is not indexed");
    }
}

/// A block hash is evenly distributed already; the group only has to move it elsewhere.
fn table_hash(hash: &BlockHash, group: GroupId) -> u64 {
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    hash.to_words()[0] ^ u64::from(group.0).wrapping_mul(SPREAD)
}
