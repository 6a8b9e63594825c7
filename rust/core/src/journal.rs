//! What happens to blocks, in its order, for those who ask: the sources of vLLM's KV cache events
//! (`distributed/kv_events.py`) and of its residency metrics (`v1/core/kv_cache_metrics.py`).
//!
//! Nothing is noted unless it was asked for, and the caller takes the entries out after each call
//! of the scheduler, before the places of ended requests are given to others.

use crate::block_hash::BlockHash;
use crate::ids::{BlockId, GroupId, RequestIndex};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalConfig {
    /// Prefixes that come into the cache and leave it.
    pub prefixes: bool,
    /// Each use of a block.
    pub uses: bool,
    /// Tokens behind each block that are noted with its prefix.
    pub num_lookahead_tokens: usize,
}

/// Blocks of one request and group that can be found from now on, or were found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    /// Whose they are. The place may be given to another after the call that this was noted in.
    pub request: RequestIndex,
    pub group: GroupId,
    /// Tokens a block: of its group, or of a hash that ends within a block.
    pub block_size: u32,
    /// Positions, in blocks of that size, of the blocks that `hashes` are of.
    pub positions: Vec<u32>,
    /// The hashes that they are found by.
    pub hashes: Vec<BlockHash>,
    /// The hash of the block before the first position looked at.
    pub parent: Option<BlockHash>,
    /// All tokens from the first position looked at to the last.
    pub tokens: Vec<i32>,
    /// For each of `hashes`, the tokens behind its block, as far as there are any.
    pub lookahead: Vec<Vec<i32>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Blocks came into the prefix cache, or were found there by a request that reports that.
    Stored(Box<StoredBlocks>),
    /// A block left the prefix cache.
    Removed {
        /// What it was found by.
        hash: BlockHash,
        group: GroupId,
    },
    Cleared,
    /// A block was handed out.
    Allocated(BlockId),
    /// A cached block got one more owner.
    Accessed(BlockId),
    /// A block was about to be handed out, or dropped from the cache.
    Evicted(BlockId),
    /// All blocks were forgotten.
    Reset,
}

/// Entries since they were last taken.
#[derive(Clone, Debug, Default)]
pub struct Journal {
    config: JournalConfig,
    entries: Vec<Entry>,
}

impl Journal {
    pub fn new(config: JournalConfig) -> Self {
        Self { config, entries: Vec::new() }
    }

    pub fn config(&self) -> JournalConfig {
        self.config
    }

    pub(crate) fn note_prefix(&mut self, entry: impl FnOnce() -> Entry) {
        if self.config.prefixes {
            self.entries.push(entry());
        }
    }

    pub(crate) fn note_use(&mut self, entry: Entry) {
        if self.config.uses {
            self.entries.push(entry);
        }
    }

    /// The entries so far, which are forgotten.
    pub fn take(&mut self) -> Vec<Entry> {
        std::mem::take(&mut self.entries)
    }
}
