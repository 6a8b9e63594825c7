//! The block pool against a model so naive that it can be checked by eye: plain vectors, searched
//! from front to back.

use proptest::prelude::*;
use sparksched_core::{BlockHash, BlockId, BlockPool, GroupId, JournalConfig};

const NUM_BLOCKS: u32 = 12;

/// What the pool is meant to be.
#[derive(Default)]
struct NaivePool {
    /// Owners by block.
    ref_counts: Vec<u32>,
    /// Free blocks, the next one to be handed out first.
    free: Vec<u32>,
    /// Cached blocks with what they cache, in the order in which they were cached.
    cached: Vec<(u32, (u8, u32))>,
    enable_caching: bool,
}

impl NaivePool {
    fn new(enable_caching: bool) -> Self {
        let ref_counts = vec![0; NUM_BLOCKS as usize];
        Self { ref_counts, free: (1..NUM_BLOCKS).collect(), cached: vec![], enable_caching }
    }

    fn allocate(&mut self, count: usize) -> Vec<u32> {
        let blocks: Vec<u32> = self.free.drain(..count).collect();
        for &block in &blocks {
            self.cached.retain(|(cached, _)| *cached != block);
            self.ref_counts[block as usize] = 1;
        }
        blocks
    }

    fn release(&mut self, blocks: &[u32]) {
        let mut first = Vec::new();
        let mut last = Vec::new();
        for &block in blocks {
            self.ref_counts[block as usize] -= 1;
            if self.ref_counts[block as usize] == 0 {
                let keeps_content = self.is_cached(block) && self.enable_caching;
                if keeps_content { &mut last } else { &mut first }.push(block);
            }
        }
        self.free.splice(0..0, first);
        self.free.extend(last);
    }

    fn touch(&mut self, block: u32) {
        self.free.retain(|free| *free != block);
        self.ref_counts[block as usize] += 1;
    }

    fn is_cached(&self, block: u32) -> bool {
        self.cached.iter().any(|(cached, _)| *cached == block)
    }

    fn find(&self, key: (u8, u32)) -> Option<u32> {
        self.cached.iter().find(|(_, cached)| *cached == key).map(|(block, _)| *block)
    }

    fn reset_cache(&mut self) -> bool {
        let all_free = self.free.len() as u32 == NUM_BLOCKS - 1;
        if all_free {
            self.cached.clear();
        }
        all_free
    }
}

/// Numbers are taken modulo what there is to choose from.
#[derive(Clone, Debug)]
enum Operation {
    Allocate(usize),
    /// Some held blocks, in an order of their own.
    Release(Vec<usize>),
    /// The holders get one more: a prefix hit.
    Touch {
        content: u8,
        group: u32,
    },
    Cache {
        held: usize,
        content: u8,
        group: u32,
    },
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    let content = 0..4_u8;
    let group = 0..2_u32;
    prop_oneof![
        3 => (1..5_usize).prop_map(Operation::Allocate),
        4 => prop::collection::vec(0..20_usize, 1..6).prop_map(Operation::Release),
        2 => (content.clone(), group.clone())
            .prop_map(|(content, group)| Operation::Touch { content, group }),
        4 => (0..20_usize, content, group)
            .prop_map(|(held, content, group)| Operation::Cache { held, content, group }),
        1 => Just(Operation::Reset),
    ]
}

fn hash_of(content: u8) -> BlockHash {
    // Equal first bytes: the table's buckets collide, and only the whole hash tells them apart.
    let mut hash = BlockHash([7; 32]);
    hash.0[31] = content;
    hash
}

fn ids(blocks: &[u32]) -> impl Iterator<Item = BlockId> {
    blocks.iter().copied().map(BlockId)
}

/// Does to both what the operation says; `held` has a block once for each of its owners.
fn apply(operation: Operation, pool: &mut BlockPool, naive: &mut NaivePool, held: &mut Vec<u32>) {
    match operation {
        Operation::Allocate(count) => {
            let count = count.min(naive.free.len());
            let mut table = Vec::new();
            pool.allocate(count as u32, &mut table);
            let expected = naive.allocate(count);
            assert_eq!(table, ids(&expected).collect::<Vec<_>>());
            held.extend(expected);
        }
        Operation::Release(positions) => {
            let mut released = Vec::new();
            for position in positions {
                if !held.is_empty() {
                    released.push(held.remove(position % held.len()));
                }
            }
            pool.release(ids(&released));
            naive.release(&released);
        }
        Operation::Touch { content, group } => {
            let found = naive.find((content, group));
            assert_eq!(pool.find_cached(&hash_of(content), GroupId(group)), found.map(BlockId));
            if let Some(block) = found {
                pool.touch(&[BlockId(block), BlockId::NULL]);
                naive.touch(block);
                held.push(block);
            }
        }
        Operation::Cache { held: position, content, group } => {
            let Some(&block) = held.get(position % held.len().max(1)) else { return };
            if !naive.is_cached(block) {
                pool.cache(BlockId(block), &hash_of(content), GroupId(group), 4);
                naive.cached.push((block, (content, group)));
            }
        }
        Operation::Reset => assert_eq!(pool.reset_cache(), naive.reset_cache()),
    }
}

fn assert_equal(pool: &BlockPool, naive: &NaivePool) {
    pool.check_invariants();
    assert_eq!(pool.free_blocks().collect::<Vec<_>>(), ids(&naive.free).collect::<Vec<_>>());
    for (block, &owners) in naive.ref_counts.iter().enumerate() {
        assert_eq!(pool.ref_count(BlockId(block as u32)), owners);
    }
    let mut cached: Vec<_> = naive.cached.clone();
    cached.sort_unstable();
    let found = pool.cached_blocks().map(|(id, hash, group)| (id.0, (hash.0[31], group.0)));
    assert_eq!(found.collect::<Vec<_>>(), cached);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn equals_the_naive_pool(
        enable_caching in any::<bool>(),
        operations in prop::collection::vec(operation(), 1..60),
    ) {
        let mut pool = BlockPool::new(NUM_BLOCKS, enable_caching, JournalConfig::default());
        let mut naive = NaivePool::new(enable_caching);
        let mut held = Vec::new();
        assert_equal(&pool, &naive);
        for operation in operations {
            apply(operation, &mut pool, &mut naive, &mut held);
            assert_equal(&pool, &naive);
        }
    }
}

#[test]
fn a_pool_may_have_only_the_null_block() {
    let mut pool = BlockPool::new(1, true, JournalConfig::default());
    assert_eq!((pool.num_free(), pool.free_blocks().count()), (0, 0));
    assert_eq!(pool.usage(), None);
    assert!(pool.reset_cache());
    pool.check_invariants();
}

#[test]
#[should_panic(expected = "3 blocks wanted, 2 are free")]
fn more_blocks_than_there_are_is_a_bug_of_the_caller() {
    BlockPool::new(3, true, JournalConfig::default()).allocate(3, &mut Vec::new());
}
