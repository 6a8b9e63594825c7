//! What a PULL socket says: in pieces of any size it means the same, it takes no memory that it only
//! announces, and the first thing that is said is that the handshake is over.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sparksched_zmtp::protocol::{GREETING, MAX_COMMAND_BYTES, ProtocolError, Reader, Said, pong};

fn read(bytes: &[u8], piece: usize) -> (Vec<Said>, Result<(), ProtocolError>, bool) {
    let (mut reader, mut said) = (Reader::default(), Vec::new());
    let read = bytes.chunks(piece).try_for_each(|piece| reader.read(piece, |it| said.push(it)));
    (said, read, reader.is_ready())
}

fn check(bytes: &[u8], piece: usize) {
    let (said, result, is_ready) = read(bytes, bytes.len().max(1));
    assert_eq!((said.clone(), result, is_ready), read(bytes, piece), "pieces mean something else");
    for (at, what) in said.iter().enumerate() {
        assert_eq!(*what == Said::Ready, at == 0);
        if let Said::Ping(context) = what {
            assert!(context.len() < MAX_COMMAND_BYTES && pong(context).len() <= 23);
        }
    }
    assert_eq!(!said.is_empty(), is_ready);
}

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    let piece = usize::from(piece) + 1;
    check(bytes, piece);
    // Most of what is interesting comes after a greeting.
    check(&[&GREETING[..], bytes].concat(), piece);
});
