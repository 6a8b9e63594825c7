//! Groups of recurrent states (Mamba, linear attention): what is particular to them. Mirrors
//! `MambaManager` of vLLM's `v1/core/single_type_kv_cache_manager.py` and the functions about
//! checkpoints of `v1/kv_cache_interface.py`.
//!
//! A state stands for the whole prefix before it, so a request needs the last one only, and the
//! next block begins with a copy of it. With `align`, the state at the end of a block is kept for
//! the prefix cache, and chunks of a prompt end where a state is worth keeping. Left out: what KV
//! connectors are told of states.
//!
//! An example, with blocks of 16 tokens and 64 tokens a step: a prompt of 40 tokens is computed in
//! chunks of 32 and 8 tokens. The state after 32 tokens stays in the prefix cache. One of 100 tokens
//! takes chunks of 64, 32 and 4. If hits may end within a block, every 4 tokens say, a prompt of 42
//! tokens ends its chunks at 32, 40 and 42. The tables of blocks are in `kv_cache_manager/mixed.rs`.

use hashbrown::HashTable;

use crate::block_hash::{BlockHash, HashWords};
use crate::block_pool::table_hash;
use crate::config::{SchedulerConfig, StateConfig};
use crate::ids::{BlockId, GroupId};

/// What a request's table doesn't tell: of a group of states, or of a block that is to be copied.
#[derive(Clone, Debug, Default)]
pub(crate) struct StateBlocks {
    /// Where the state is that the last allocation but one wrote.
    pub(crate) last_state: Option<usize>,
    /// The group has given it blocks, the speculative ones included.
    pub(crate) is_allocated: bool,
    /// A block within this step's chunk of the prompt that gets the state at a position before the
    /// chunk's end.
    pub(crate) checkpoint: Option<Checkpoint>,
    /// A block that is in the prefix cache although it isn't full, by its place in the table: it
    /// must be copied before the request goes on in it.
    pub(crate) partial: Option<(usize, BlockId)>,
    /// The tail of the prompt can be found for as long as the request holds its blocks.
    pub(crate) is_tail_cached: bool,
}

/// A state that is kept from the middle of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// Tokens that it stands for.
    pub(crate) num_tokens: u32,
    /// Its block's place in the table.
    pub(crate) place: usize,
}

/// A chunk of a prompt, for the question whether it can keep a state from its middle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Where the prompt ends, or what is computed again of a sequence; 0 to take every chunk.
    pub(crate) prefill_end: u32,
}

impl Chunk {
    /// Whether a backend can keep the state at this position: vLLM's
    /// `is_mamba_prefill_checkpoint_valid()`, and that the chunk ends the prompt.
    pub(crate) fn can_keep(
        &self,
        position: u32,
        hash_block_size: u32,
        block_size: u32,
        alignment: Option<u32>,
    ) -> bool {
        let Some(alignment) = alignment else { return false };
        let Self { start, end, prefill_end } = *self;
        let first_column = (i64::from(start) - 1).div_euclid(i64::from(block_size));
        let column = i64::from(end.div_ceil(block_size)) - 2;
        end >= prefill_end
            && start.is_multiple_of(hash_block_size)
            && column > first_column
            && start + hash_block_size <= position
            && position < end
            && (position - start).is_multiple_of(alignment)
    }
}

impl StateConfig {
    /// The last position among `num_tokens` tokens whose state another request can use: vLLM's
    /// `get_mamba_prefill_checkpoint_position()`.
    pub(crate) fn checkpoint_position(&self, num_tokens: u32, unit: u32) -> u32 {
        // A resend computes its last token anew; a drafter drops more than that.
        let num_left = if self.drops_last_unit { 0 } else { self.num_hash_lookahead_tokens.max(1) };
        let position = num_tokens.saturating_sub(num_left) / unit * unit;
        position.saturating_sub(if self.drops_last_unit { unit } else { 0 })
    }
}

/// How chunks of prompts are cut so that states can be kept: vLLM's `_mamba_block_aligned_split()`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChunkAligner {
    states: StateConfig,
    /// Tokens a block of the scheduler: the least common multiple of the groups'.
    scheduler_block_size: u32,
    hash_block_size: u32,
    /// Hits may end within a block.
    has_partial_hits: bool,
}

/// What is to be known of a request's sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence {
    pub(crate) num_prompt_tokens: u32,
    pub(crate) num_tokens: u32,
    /// End of a prefix shared with others that some groups had to compute again; 0 for none.
    pub(crate) junction: u32,
}

impl ChunkAligner {
    /// Of a configuration whose states are kept at the ends of blocks, else `None`.
    pub(crate) fn new(config: &SchedulerConfig) -> Option<Self> {
        config.states.aligns_chunks.then_some(Self {
            states: config.states,
            scheduler_block_size: config.block_size,
            hash_block_size: config.hash_block_size,
            has_partial_hits: config.partial_hits && config.hash_block_size < config.block_size,
        })
    }

    /// Shortens a chunk that begins at `start` to where it should end; 0 if it can't begin.
    /// `max_chunk` is the longest that the step's knobs allow.
    pub(crate) fn align(
        &self,
        sequence: Sequence,
        start: u32,
        num_tokens: u32,
        max_chunk: u32,
    ) -> u32 {
        let Sequence { num_prompt_tokens, num_tokens: num_known, junction } = sequence;
        let prefill_end = num_prompt_tokens.max(num_known.saturating_sub(1));
        if start >= prefill_end {
            return num_tokens;
        }
        let block_size = self.states.block_size;
        let mut end = start + num_tokens;
        let unit =
            if self.has_partial_hits { self.hash_block_size } else { self.scheduler_block_size };
        let checkpoint = self.states.checkpoint_position(prefill_end, unit);
        let keeps_within = self.states.has_checkpoint_blocks && {
            let (hash_block_size, alignment) =
                (self.hash_block_size, self.states.checkpoint_alignment);
            let chunk = Chunk { start, end, prefill_end };
            chunk.can_keep(checkpoint, hash_block_size, block_size, alignment)
        };
        let last_position =
            if keeps_within { 0 } else { self.states.checkpoint_position(num_known, block_size) };
        // States are written at the ends of chunks. A block that no chunk can fill is filled in
        // several, up to its end.
        if end < prefill_end {
            let aligned = end - end % block_size;
            if aligned > start || block_size <= max_chunk {
                end = aligned;
            }
        }
        let tail = if self.has_partial_hits && !keeps_within {
            self.states.checkpoint_position(num_prompt_tokens, self.hash_block_size)
        } else {
            0
        };
        let stops = [
            if !start.is_multiple_of(block_size) && !keeps_within {
                start - start % block_size + block_size
            } else {
                0
            },
            last_position,
            if last_position < tail && tail < num_prompt_tokens { tail } else { 0 },
            if start < junction && junction < end {
                self.junction_stop(sequence, start)
            } else {
                0
            },
        ];
        let end = stops.into_iter().filter(|&it| start < it && it < end).min().unwrap_or(end);
        end.saturating_sub(start)
    }

    /// Where to stop for the prefix that a request shares with others.
    fn junction_stop(&self, sequence: Sequence, start: u32) -> u32 {
        let Sequence { num_prompt_tokens, junction, .. } = sequence;
        let keeps_any = self.states.keeps_junctions && self.has_partial_hits;
        if keeps_any && junction <= num_prompt_tokens {
            return junction;
        }
        junction - (junction - start) % self.states.block_size
    }
}

/// Prefixes that came into the cache in this step: their states are there only after it.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeySet(HashTable<(HashWords, u32)>);

impl KeySet {
    pub(crate) fn insert(&mut self, (hash, group): (BlockHash, GroupId)) {
        let key = (hash.to_words(), group.0);
        let hash_of =
            |key: &(HashWords, u32)| table_hash(&BlockHash::from_words(key.0), GroupId(key.1));
        self.0.entry(table_hash(&hash, group), |other| *other == key, hash_of).or_insert(key);
    }

    pub(crate) fn contains(&self, (hash, group): (BlockHash, GroupId)) -> bool {
        let key = (hash.to_words(), group.0);
        self.0.find(table_hash(&hash, group), |other| *other == key).is_some()
    }

    pub(crate) fn clear(&mut self) {
        if !self.0.is_empty() {
            self.0.clear();
        }
    }
}
