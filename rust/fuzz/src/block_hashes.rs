//! Block hashes of any tokens and extra keys: those of bytes that two other encoders make (`ciborium`
//! and a pickler after Python's own, below), however often a sequence is hashed on its way.

use arbitrary::Arbitrary;
use ciborium::Value as Cbor;
use sha2::{Digest, Sha256};
use sparksched_core::{BlockHash, BlockHasher, ExtraKeys, HashAlgorithm};
use xxhash_rust::xxh3::xxh3_128;

const NAMES: [&str; 4] = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"];
/// How deeply extra keys are nested, at most.
const MAX_DEPTH: u32 = 4;

/// A Python object of a kind that hashes cover.
#[derive(Arbitrary, Clone, Debug)]
enum Object {
    None,
    Int(i32),
    Bytes(Vec<u8>),
    Str(String),
    Tuple(Vec<Object>),
}

/// A sequence, and how it is hashed.
#[derive(Arbitrary, Debug)]
pub struct Input {
    algorithm: u8,
    block_size: u8,
    num_lookahead_tokens: u8,
    none_hash: Vec<u8>,
    tokens: Vec<i32>,
    /// Extra keys of the first blocks, and of the others.
    keys: Option<(Vec<Object>, Object)>,
    /// How far the sequence has come each time it is hashed.
    stops: Vec<u8>,
}

// ------------------------------------------------------------------------------------
// Python's serialisers, as their formats define them
// ------------------------------------------------------------------------------------

/// `pickle.dumps(..., protocol=5)` of objects of which none occurs twice.
#[derive(Default)]
struct Pickler(Vec<u8>);

impl Pickler {
    fn dumps(object: &Object) -> Vec<u8> {
        let mut pickler = Self::default();
        pickler.save(object);
        pickler.0.push(b'.');
        let frame_len = pickler.0.len() as u64;
        // Shorter ones get no frame.
        let frame = [&b"\x95"[..], &frame_len.to_le_bytes()].concat();
        let frame = if frame_len < 4 { &[][..] } else { &frame };
        [b"\x80\x05", frame, &pickler.0].concat()
    }

    fn save(&mut self, object: &Object) {
        match object {
            Object::None => self.0.push(b'N'),
            Object::Int(value) => self.save_int(*value),
            Object::Bytes(bytes) => self.save_string(*b"CB", bytes),
            Object::Str(text) => self.save_string(*b"\x8cX", text.as_bytes()),
            Object::Tuple(items) => self.save_tuple(items),
        }
    }

    fn save_int(&mut self, value: i32) {
        let bytes = value.to_le_bytes();
        let (opcode, len) = match value {
            0..=0xff => (b'K', 1),
            0x100..=0xffff => (b'M', 2),
            _ => (b'J', 4),
        };
        self.0.push(opcode);
        self.0.extend(&bytes[..len]);
    }

    /// With the opcodes for up to 255 bytes, and for more.
    fn save_string(&mut self, [short, long]: [u8; 2], bytes: &[u8]) {
        if let Ok(len) = u8::try_from(bytes.len()) {
            self.0.extend([short, len]);
        } else {
            self.0.push(long);
            self.0.extend((bytes.len() as u32).to_le_bytes());
        }
        self.0.extend(bytes);
        self.0.push(0x94);
    }

    fn save_tuple(&mut self, items: &[Object]) {
        match items.len() {
            // There is one empty tuple, and it is not numbered.
            0 => return self.0.push(b')'),
            1..=3 => {}
            _ => self.0.push(b'('),
        }
        for item in items {
            self.save(item);
        }
        self.0.push([b't', 0x85, 0x86, 0x87].get(items.len()).copied().unwrap_or(b't'));
        self.0.push(0x94);
    }
}

fn as_cbor(object: &Object) -> Cbor {
    match object {
        Object::None => Cbor::Null,
        Object::Int(value) => Cbor::Integer((*value).into()),
        Object::Bytes(bytes) => Cbor::Bytes(bytes.clone()),
        Object::Str(text) => Cbor::Text(text.clone()),
        Object::Tuple(items) => Cbor::Array(items.iter().map(as_cbor).collect()),
    }
}

fn dumps(object: &Object, is_cbor: bool) -> Vec<u8> {
    if !is_cbor {
        return Pickler::dumps(object);
    }
    let mut bytes = Vec::new();
    ciborium::into_writer(&as_cbor(object), &mut bytes).unwrap();
    bytes
}

// ------------------------------------------------------------------------------------
// Hashes, one block at a time
// ------------------------------------------------------------------------------------

impl Object {
    fn depth(&self) -> u32 {
        match self {
            Self::Tuple(items) => 1 + items.iter().map(Self::depth).max().unwrap_or(0),
            _ => 0,
        }
    }

    fn ints(values: &[i32]) -> impl Iterator<Item = Self> {
        values.iter().copied().map(Self::Int)
    }
}

impl Input {
    fn is_cbor(&self) -> bool {
        self.algorithm % 2 == 1
    }

    fn block_size(&self) -> usize {
        usize::from(self.block_size) + 1
    }

    fn lookahead(&self) -> usize {
        usize::from(self.num_lookahead_tokens % 8)
    }

    fn keys_of_block(&self, position: usize) -> Object {
        let Some((leading, others)) = &self.keys else { return Object::None };
        leading.get(position).unwrap_or(others).clone()
    }

    /// What stands for keys in a serialised tuple.
    fn serialised(&self, keys: &Object) -> Box<[u8]> {
        let tuple = Object::Tuple(vec![Object::Bytes(b"p".to_vec()), Object::Int(0), keys.clone()]);
        let bytes = dumps(&tuple, self.is_cbor());
        let (before, behind) = if self.is_cbor() { (4, 0) } else { (2 + 9 + 4 + 2, 3) };
        bytes[before..bytes.len() - behind].into()
    }

    fn extra_keys(&self) -> Option<ExtraKeys> {
        let (leading, others) = self.keys.as_ref()?;
        let leading = leading.iter().map(|keys| self.serialised(keys)).collect();
        Some(ExtraKeys { leading, others: self.serialised(others) })
    }

    fn expected_hash(&self, parent: &[u8], position: usize) -> Vec<u8> {
        let (start, end) = (position * self.block_size(), (position + 1) * self.block_size());
        let mut keys = self.keys_of_block(position);
        if self.lookahead() > 0 {
            let behind = Object::ints(&self.tokens[end..end + self.lookahead()]);
            keys = Object::Tuple([keys].into_iter().chain(behind).collect());
        }
        let tokens = Object::Tuple(Object::ints(&self.tokens[start..end]).collect());
        let block = Object::Tuple(vec![Object::Bytes(parent.to_vec()), tokens, keys]);
        let bytes = dumps(&block, self.is_cbor());
        if self.algorithm % 4 < 2 {
            Sha256::digest(&bytes).to_vec()
        } else {
            xxh3_128(&bytes).to_be_bytes().to_vec()
        }
    }

    fn expected_hashes(&self) -> Vec<BlockHash> {
        let num_hashable = self.tokens.len().saturating_sub(self.lookahead());
        let mut parent = self.none_hash.clone();
        let mut hashes = Vec::new();
        for position in 0..num_hashable / self.block_size() {
            parent = self.expected_hash(&parent, position);
            hashes.push(BlockHash::from_digest(&parent).unwrap());
        }
        hashes
    }
}

/// Hashes the sequence as far as each stop.
pub fn check(input: &Input) {
    let depths = input.keys.iter().flat_map(|(leading, others)| leading.iter().chain([others]));
    if depths.map(Object::depth).max().unwrap_or(0) > MAX_DEPTH {
        return;
    }
    let algorithm = HashAlgorithm::from_name(NAMES[usize::from(input.algorithm % 4)]).unwrap();
    let hasher = BlockHasher::new(algorithm, input.block_size() as u32, &input.none_hash);
    assert_eq!(hasher.is_none(), input.none_hash.len() > 32);
    let Some(hasher) = hasher else { return };
    let hasher = hasher.with_lookahead(input.lookahead() as u32).unwrap();
    let extra_keys = input.extra_keys();
    let expected = input.expected_hashes();
    let mut hashes = Vec::new();
    let mut len = 0;
    for stop in input.stops.iter().map(|stop| usize::from(*stop)).chain([input.tokens.len()]) {
        len = input.tokens.len().min(len + stop);
        hasher.extend_hashes(&input.tokens[..len], extra_keys.as_ref(), &mut hashes);
        assert_eq!(hashes.len(), hasher.num_hashable_blocks(len));
        assert_eq!(hashes, expected[..hashes.len()]);
    }
    assert_eq!(hashes.len(), expected.len());
}
