//! `rmp`'s functions for a buffer, which takes everything: each value in its shortest form, as
//! `msgspec` writes it.

use rmp::encode::{self, ByteBuf};

/// A buffer of msgpack values.
#[derive(Debug)]
pub(crate) struct Writer(ByteBuf);

impl Writer {
    /// A buffer that begins with bytes.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self(ByteBuf::from_vec(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.as_slice()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut Vec<u8> {
        self.0.as_mut_vec()
    }

    pub(crate) fn array(&mut self, len: usize) {
        let Ok(_) = encode::write_array_len(&mut self.0, len as u32);
    }

    pub(crate) fn map(&mut self, len: usize) {
        let Ok(_) = encode::write_map_len(&mut self.0, len as u32);
    }

    pub(crate) fn nil(&mut self) {
        self.0.as_mut_vec().push(0xc0);
    }

    pub(crate) fn bool(&mut self, value: bool) {
        self.0.as_mut_vec().push(if value { 0xc3 } else { 0xc2 });
    }

    pub(crate) fn int(&mut self, value: i64) {
        let Ok(_) = encode::write_sint(&mut self.0, value);
    }

    pub(crate) fn uint(&mut self, value: u64) {
        let Ok(_) = encode::write_uint(&mut self.0, value);
    }

    pub(crate) fn float(&mut self, value: f64) {
        let Ok(()) = encode::write_f64(&mut self.0, value);
    }

    pub(crate) fn str(&mut self, value: &str) {
        let Ok(()) = encode::write_str(&mut self.0, value);
    }

    /// Values that are msgpack already.
    pub(crate) fn encoded(&mut self, values: &[u8]) {
        self.0.as_mut_vec().extend_from_slice(values);
    }
}
