//! Hashes of full blocks: `hash_block_tokens` and the hash functions that vLLM offers by name
//! (`v1/core/kv_cache_utils.py`, `utils/hashing.py`).
//!
//! A block's hash covers its tokens and the hash of the block before it, so it stands for the
//! whole prefix. vLLM feeds the tuple `(parent hash, tokens, extra keys)` to pickle or CBOR and
//! the bytes to SHA-256 or XXH3; here the same bytes are written directly, but for the extra keys
//! (`LoRA`, cache salts, multimodal items): they come serialised, see [`ExtraKeys`].
//!
//! Hashes may look ahead: a drafter's KV at the end of a block depends on the tokens behind it. Then
//! a block is hashed when these are there, and in the place of the extra keys stands the tuple
//! `(extra keys, token, token, ...)`.

use sha2::{Digest, Sha256};

/// Bytes that a hash takes at most: SHA-256's digest.
pub const MAX_HASH_LEN: usize = 32;

/// A hash as a table of hashes holds it: an all-zero table of words costs no memory until used.
pub type HashWords = [u64; MAX_HASH_LEN / 8];

/// The hash of a prefix that ends at a block boundary; shorter digests are padded with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHash(pub [u8; MAX_HASH_LEN]);

impl BlockHash {
    /// Takes a digest as vLLM has it, or `None` if it is longer than any that it produces.
    pub fn from_digest(digest: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_HASH_LEN];
        bytes.get_mut(..digest.len())?.copy_from_slice(digest);
        Some(Self(bytes))
    }

    /// The same bytes as machine words. The first is evenly distributed and finds it in a table.
    pub fn to_words(&self) -> HashWords {
        let mut words = HashWords::default();
        for (word, bytes) in words.iter_mut().zip(self.0.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    pub fn from_words(words: HashWords) -> Self {
        let mut hash = Self([0; MAX_HASH_LEN]);
        for (bytes, word) in hash.0.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        hash
    }
}

/// The values of vLLM's `prefix_caching_hash_algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// Pickle, then SHA-256.
    Sha256,
    /// Canonical CBOR, then SHA-256.
    Sha256Cbor,
    /// Pickle, then XXH3 with 128 bits.
    Xxhash,
    /// Canonical CBOR, then XXH3 with 128 bits.
    XxhashCbor,
}

impl HashAlgorithm {
    /// The algorithm that vLLM calls `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "sha256" => Some(Self::Sha256),
            "sha256_cbor" => Some(Self::Sha256Cbor),
            "xxhash" => Some(Self::Xxhash),
            "xxhash_cbor" => Some(Self::XxhashCbor),
            _ => None,
        }
    }

    pub const fn digest_len(self) -> usize {
        match self {
            Self::Sha256 | Self::Sha256Cbor => 32,
            Self::Xxhash | Self::XxhashCbor => 16,
        }
    }

    const fn is_cbor(self) -> bool {
        matches!(self, Self::Sha256Cbor | Self::XxhashCbor)
    }

    fn digest(self, bytes: &[u8]) -> BlockHash {
        let mut hash = BlockHash([0; MAX_HASH_LEN]);
        match self {
            Self::Sha256 | Self::Sha256Cbor => {
                hash.0.copy_from_slice(Sha256::digest(bytes).as_slice());
            }
            Self::Xxhash | Self::XxhashCbor => {
                let digest = xxhash_rust::xxh3::xxh3_128(bytes).to_be_bytes();
                hash.0[..digest.len()].copy_from_slice(&digest);
            }
        }
        hash
    }
}

/// What is hashed of a request's blocks besides their tokens, as the hasher's serialiser writes it
/// in the third place of the tuple.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraKeys {
    /// Those of the first blocks, one by one.
    pub leading: Vec<Box<[u8]>>,
    /// Those of each further block.
    pub others: Box<[u8]>,
}

impl ExtraKeys {
    fn of_block(&self, position: usize) -> &[u8] {
        self.leading.get(position).unwrap_or(&self.others)
    }
}

/// Hashes the blocks of a sequence, one after another.
#[derive(Clone, Debug)]
pub struct BlockHasher {
    algorithm: HashAlgorithm,
    block_size: usize,
    /// Tokens behind a block that its hash covers as well.
    num_lookahead_tokens: usize,
    /// What stands in for the parent of a first block: vLLM's `NONE_HASH`.
    none_hash: Box<[u8]>,
}

/// A pickle's frames end at 64 KiB; blocks that need more than one are not written here.
const MAX_PICKLE_BODY: usize = 64 * 1024;
/// Bytes of a pickled block that are neither tokens nor extra keys, rounded up.
const PICKLE_OVERHEAD: usize = 128;
/// Bytes of the longest pickled token.
const PICKLED_TOKEN: usize = 5;

impl BlockHasher {
    /// A hasher for blocks of `block_size` tokens, or `None` if such a block does not fit into one
    /// frame of a pickle or `none_hash` is longer than a digest can be.
    pub fn new(algorithm: HashAlgorithm, block_size: u32, none_hash: &[u8]) -> Option<Self> {
        let hasher = Self {
            algorithm,
            block_size: block_size as usize,
            num_lookahead_tokens: 0,
            none_hash: none_hash.into(),
        };
        (hasher.fits() && block_size > 0 && none_hash.len() <= MAX_HASH_LEN).then_some(hasher)
    }

    /// The same hasher, but its hashes cover so many tokens behind each block, too; or `None` if
    /// that does not fit into one frame of a pickle.
    pub fn with_lookahead(self, num_tokens: u32) -> Option<Self> {
        let hasher = Self { num_lookahead_tokens: num_tokens as usize, ..self };
        hasher.fits().then_some(hasher)
    }

    fn fits(&self) -> bool {
        let num_tokens = self.block_size + self.num_lookahead_tokens;
        num_tokens * PICKLED_TOKEN + PICKLE_OVERHEAD < MAX_PICKLE_BODY
    }

    /// Replaces `none_hash`. Returns whether it can be: it must not be longer than a digest.
    pub fn set_none_hash(&mut self, none_hash: &[u8]) -> bool {
        let is_valid = none_hash.len() <= MAX_HASH_LEN;
        if is_valid {
            self.none_hash = none_hash.into();
        }
        is_valid
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens behind a block that its hash covers as well.
    pub fn num_lookahead_tokens(&self) -> usize {
        self.num_lookahead_tokens
    }

    /// How many blocks of a sequence of `num_tokens` tokens have a hash.
    pub fn num_hashable_blocks(&self, num_tokens: usize) -> usize {
        num_tokens.saturating_sub(self.num_lookahead_tokens) / self.block_size
    }

    /// Whether the last of `num_tokens` tokens was the one that a block's hash had waited for.
    pub(crate) fn completes_block(&self, num_tokens: usize) -> bool {
        let end = num_tokens.checked_sub(self.num_lookahead_tokens);
        end.is_some_and(|end| end.is_multiple_of(self.block_size))
    }

    pub fn digest_len(&self) -> usize {
        self.algorithm.digest_len()
    }

    /// Appends the hashes of all blocks of `tokens` that are full and not yet in `hashes`.
    pub fn extend_hashes(
        &self,
        tokens: &[i32],
        extra_keys: Option<&ExtraKeys>,
        hashes: &mut Vec<BlockHash>,
    ) {
        let num_blocks = self.num_hashable_blocks(tokens.len());
        hashes.reserve(num_blocks.saturating_sub(hashes.len()));
        let mut buffer = Vec::with_capacity(self.block_size * PICKLED_TOKEN + PICKLE_OVERHEAD);
        let mut with_lookahead = Vec::new();
        for block in hashes.len()..num_blocks {
            let (start, end) = (block * self.block_size, (block + 1) * self.block_size);
            let mut keys = extra_keys.map_or(self.no_extra_keys(), |keys| keys.of_block(block));
            if self.num_lookahead_tokens > 0 {
                let lookahead = &tokens[end..end + self.num_lookahead_tokens];
                self.write_lookahead(keys, lookahead, &mut with_lookahead);
                keys = &with_lookahead;
            }
            let hash = self.hash_with_buffer(hashes.last(), &tokens[start..end], keys, &mut buffer);
            hashes.push(hash);
        }
    }

    /// Writes what stands in the place of a block's extra keys if its hash looks ahead.
    fn write_lookahead(&self, extra_keys: &[u8], tokens: &[i32], out: &mut Vec<u8>) {
        out.clear();
        if self.algorithm.is_cbor() {
            cbor::write_lookahead(extra_keys, tokens, out);
        } else {
            pickle::write_lookahead(extra_keys, tokens, out);
        }
    }

    /// Python's None.
    fn no_extra_keys(&self) -> &'static [u8] {
        if self.algorithm.is_cbor() { &[cbor::NULL] } else { &[pickle::NONE] }
    }

    fn hash_with_buffer(
        &self,
        parent: Option<&BlockHash>,
        tokens: &[i32],
        extra_keys: &[u8],
        buffer: &mut Vec<u8>,
    ) -> BlockHash {
        let parent = parent.map_or(&*self.none_hash, |hash| &hash.0[..self.digest_len()]);
        buffer.clear();
        if self.algorithm.is_cbor() {
            cbor::write_block(parent, tokens, extra_keys, buffer);
        } else {
            pickle::write_block(parent, tokens, extra_keys, buffer);
        }
        self.algorithm.digest(buffer)
    }
}

/// `pickle.dumps((parent, tokens, extra_keys), protocol=5)` as Python writes it.
mod pickle {
    const PROTOCOL_5: [u8; 2] = [0x80, 5];
    const FRAME: u8 = 0x95;
    const MEMOIZE: u8 = 0x94;
    const SHORT_BINBYTES: u8 = b'C';
    const MARK: u8 = b'(';
    const TUPLE: u8 = b't';
    /// Tuples of one, two and three items have opcodes of their own.
    const SMALL_TUPLES: [u8; 3] = [0x85, 0x86, 0x87];
    const BININT1: u8 = b'K';
    const BININT2: u8 = b'M';
    const BININT: u8 = b'J';
    pub(super) const NONE: u8 = b'N';
    const STOP: u8 = b'.';
    const HEADER_LEN: usize = PROTOCOL_5.len() + 1 + 8;

    pub(super) fn write_block(parent: &[u8], tokens: &[i32], extra_keys: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(&PROTOCOL_5);
        out.push(FRAME);
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(&[SHORT_BINBYTES, parent.len() as u8]);
        out.extend_from_slice(parent);
        out.push(MEMOIZE);
        write_tokens(tokens, out);
        out.extend_from_slice(extra_keys);
        out.extend_from_slice(&[SMALL_TUPLES[2], MEMOIZE, STOP]);
        let body_len = (out.len() - HEADER_LEN) as u64;
        out[HEADER_LEN - 8..HEADER_LEN].copy_from_slice(&body_len.to_le_bytes());
    }

    /// The tuple `(extra_keys, *tokens)`.
    pub(super) fn write_lookahead(extra_keys: &[u8], tokens: &[i32], out: &mut Vec<u8>) {
        let small_tuple = SMALL_TUPLES.get(tokens.len());
        if small_tuple.is_none() {
            out.push(MARK);
        }
        out.extend_from_slice(extra_keys);
        for &token in tokens {
            write_int(token, out);
        }
        out.extend_from_slice(&[*small_tuple.unwrap_or(&TUPLE), MEMOIZE]);
    }

    fn write_tokens(tokens: &[i32], out: &mut Vec<u8>) {
        if let Some(&opcode) = SMALL_TUPLES.get(tokens.len() - 1) {
            for &token in tokens {
                write_int(token, out);
            }
            out.push(opcode);
        } else {
            out.push(MARK);
            for &token in tokens {
                write_int(token, out);
            }
            out.push(TUPLE);
        }
        out.push(MEMOIZE);
    }

    fn write_int(value: i32, out: &mut Vec<u8>) {
        if let Ok(byte) = u8::try_from(value) {
            out.extend_from_slice(&[BININT1, byte]);
        } else if let Ok(short) = u16::try_from(value) {
            let [low, high] = short.to_le_bytes();
            out.extend_from_slice(&[BININT2, low, high]);
        } else {
            let [a, b, c, d] = value.to_le_bytes();
            out.extend_from_slice(&[BININT, a, b, c, d]);
        }
    }
}

/// `cbor2.dumps((parent, tokens, extra_keys), canonical=True)`: RFC 8949, shortest forms.
mod cbor {
    const UNSIGNED: u8 = 0;
    const NEGATIVE: u8 = 1;
    const BYTES: u8 = 2;
    const ARRAY: u8 = 4;
    pub(super) const NULL: u8 = 0xf6;
    /// Additional information of a head: the argument follows in one, two or four bytes.
    const ONE_BYTE: u8 = 0x18;
    const TWO_BYTES: u8 = 0x19;
    const FOUR_BYTES: u8 = 0x1a;

    pub(super) fn write_block(parent: &[u8], tokens: &[i32], extra_keys: &[u8], out: &mut Vec<u8>) {
        write_head(ARRAY, 3, out);
        write_head(BYTES, parent.len() as u32, out);
        out.extend_from_slice(parent);
        write_head(ARRAY, tokens.len() as u32, out);
        write_ints(tokens, out);
        out.extend_from_slice(extra_keys);
    }

    /// The array `[extra_keys, *tokens]`.
    pub(super) fn write_lookahead(extra_keys: &[u8], tokens: &[i32], out: &mut Vec<u8>) {
        write_head(ARRAY, 1 + tokens.len() as u32, out);
        out.extend_from_slice(extra_keys);
        write_ints(tokens, out);
    }

    fn write_ints(values: &[i32], out: &mut Vec<u8>) {
        for &value in values {
            match u32::try_from(value) {
                Ok(value) => write_head(UNSIGNED, value, out),
                // -1 - n stands for the negative number n.
                Err(_) => write_head(NEGATIVE, (!value).cast_unsigned(), out),
            }
        }
    }

    /// The major type and its argument in the fewest bytes.
    fn write_head(major: u8, argument: u32, out: &mut Vec<u8>) {
        let major = major << 5;
        match argument {
            0..24 => out.push(major | argument as u8),
            24..0x100 => out.extend_from_slice(&[major | ONE_BYTE, argument as u8]),
            0x100..0x1_0000 => {
                out.push(major | TWO_BYTES);
                out.extend_from_slice(&(argument as u16).to_be_bytes());
            }
            _ => {
                out.push(major | FOUR_BYTES);
                out.extend_from_slice(&argument.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_need_several_pickle_frames_are_refused() {
        assert!(BlockHasher::new(HashAlgorithm::Sha256, 13_000, &[]).is_some());
        assert!(BlockHasher::new(HashAlgorithm::Sha256, 13_100, &[]).is_none());
        assert!(BlockHasher::new(HashAlgorithm::Sha256, 0, &[]).is_none());
    }
}
