//! Identifiers as types of their own, so that a block can't be passed for a request.

/// A KV cache block: an index into the pool. Block 0 is the null block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The placeholder for positions that hold no KV: never free, never cached.
    pub const NULL: Self = Self(0);

    /// Whether this is the placeholder block.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A KV cache group: layers that share one block table. Equals vLLM's `kv_cache_group_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct GroupId(pub u32);

/// A request's place in the scheduler's slab, reused once the request has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct RequestIndex(pub u32);

impl RequestIndex {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}
