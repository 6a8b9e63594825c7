//! What a PULL socket says: in pieces of any size it means the same, it takes no memory that it only
//! announces, and the first thing that is said is that the handshake is over.

use arbitrary::Arbitrary;
use sparksched_zmtp::protocol::{GREETING, MAX_COMMAND_BYTES, ProtocolError, Reader, Said, pong};

/// The size of pieces, and the bytes.
#[derive(Arbitrary, Debug)]
pub struct Input<'a>(u8, &'a [u8]);

fn read(bytes: &[u8], piece: usize) -> (Vec<Said>, Result<(), ProtocolError>, bool) {
    let (mut reader, mut said) = (Reader::default(), Vec::new());
    let read = bytes.chunks(piece).try_for_each(|piece| reader.read(piece, |it| said.push(it)));
    (said, read, reader.is_ready())
}

fn check_pieces(bytes: &[u8], piece: usize) {
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

/// Reads the bytes by themselves and behind a greeting.
pub fn check(Input(piece, bytes): &Input) {
    let piece = usize::from(*piece) + 1;
    check_pieces(bytes, piece);
    // Most of what is interesting comes after a greeting.
    check_pieces(&[&GREETING[..], bytes].concat(), piece);
}
