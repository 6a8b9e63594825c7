//! What goes over the wire: greeting, handshake, frames. No input or output here.

/// What one side says first: signature, version 3.1, mechanism NULL, not a server, filler.
pub const GREETING: [u8; GREETING_BYTES] = {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xFF;
    greeting[9] = 0x7F;
    greeting[10] = 3;
    greeting[11] = 1;
    greeting[12] = b'N';
    greeting[13] = b'U';
    greeting[14] = b'L';
    greeting[15] = b'L';
    greeting
};

pub const GREETING_BYTES: usize = 64;

/// The most bytes of a command that are understood: they hold a few names.
pub const MAX_COMMAND_BYTES: usize = 4096;

pub const MAX_HEADER_BYTES: usize = 9;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a peer can't be talked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it {0}")]
pub struct ProtocolError(&'static str);

const NO_ZMTP: ProtocolError = ProtocolError("doesn't speak ZMTP");
const OLD: ProtocolError = ProtocolError("is older than ZMTP 3");
const MECHANISM: ProtocolError = ProtocolError("uses another security mechanism than NULL");
const SOCKET_TYPE: ProtocolError = ProtocolError("is not a PULL socket");
const REFUSED: ProtocolError = ProtocolError("has refused the connection");
const UNEXPECTED: ProtocolError = ProtocolError("sends what no PULL socket sends");
/// A command has no end, or parts that exceed it.
const MALFORMED: ProtocolError = ProtocolError("sends a malformed command");

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// The handshake is over: messages may be sent.
    Ready,
    /// It wants to hear [`pong`] with this context.
    Ping(Vec<u8>),
}

pub fn frame_header(len: usize, has_more: bool) -> Header {
    let more = if has_more { MORE } else { 0 };
    let mut bytes = [0; MAX_HEADER_BYTES];
    let len = if let Ok(short) = u8::try_from(len) {
        bytes[..2].copy_from_slice(&[more, short]);
        2
    } else {
        bytes[0] = more | LONG;
        bytes[1..].copy_from_slice(&(len as u64).to_be_bytes());
        MAX_HEADER_BYTES
    };
    Header { bytes, len }
}

#[derive(Clone, Copy, Debug)]
pub struct Header {
    bytes: [u8; MAX_HEADER_BYTES],
    len: usize,
}

impl Header {
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// What follows the greeting: this side is a PUSH socket.
pub fn ready() -> Vec<u8> {
    const BODY: &[u8] = b"\x05READY\x0bSocket-Type\0\0\0\x04PUSH";
    let mut command = vec![COMMAND, BODY.len() as u8];
    command.extend_from_slice(BODY);
    command
}

/// The answer to a PING with this context.
pub fn pong(context: &[u8]) -> Vec<u8> {
    /// As the specification has it.
    const MAX_CONTEXT_BYTES: usize = 16;
    let context = &context[..context.len().min(MAX_CONTEXT_BYTES)];
    let mut command = vec![COMMAND, 5 + context.len() as u8];
    command.extend_from_slice(b"\x04PONG");
    command.extend_from_slice(context);
    command
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Greeting,
    Handshake,
    Messages,
}

/// Reads what a PULL socket says. It trusts nothing and keeps at most a command.
#[derive(Debug)]
pub struct Reader {
    phase: Phase,
    unread: Vec<u8>,
}

impl Default for Reader {
    fn default() -> Self {
        Self { phase: Phase::Greeting, unread: Vec::new() }
    }
}

impl Reader {
    /// Reads what has come, in pieces of any size; calls `said` with each thing that is whole.
    ///
    /// # Errors
    /// [`ProtocolError`]: nothing that comes later can be understood.
    pub fn read(&mut self, bytes: &[u8], mut said: impl FnMut(Said)) -> Result<(), ProtocolError> {
        self.unread.extend_from_slice(bytes);
        let mut at = 0;
        let read = loop {
            match self.read_next(at) {
                Ok(Some((end, what))) => {
                    at = end;
                    what.into_iter().for_each(&mut said);
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.unread.drain(..at);
        read
    }

    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Messages
    }

    /// The end of the next whole thing and what it says, or None if it is still to come.
    fn read_next(&mut self, at: usize) -> Result<Option<(usize, Option<Said>)>, ProtocolError> {
        let unread = &self.unread[at..];
        if self.phase == Phase::Greeting {
            check_greeting(unread)?;
            if unread.len() < GREETING_BYTES {
                return Ok(None);
            }
            self.phase = Phase::Handshake;
            return Ok(Some((at + GREETING_BYTES, None)));
        }
        let Some((start, len)) = command_extent(unread)? else { return Ok(None) };
        let Some(body) = unread.get(start..start + len) else { return Ok(None) };
        let said = if self.phase == Phase::Messages {
            ping(body)?.map(Said::Ping)
        } else {
            check_ready(body)?;
            self.phase = Phase::Messages;
            Some(Said::Ready)
        };
        Ok(Some((at + start + len, said)))
    }
}

/// Checks as much of a greeting as has come.
fn check_greeting(greeting: &[u8]) -> Result<(), ProtocolError> {
    let is = |at: usize, byte: u8| greeting.get(at).is_none_or(|it| *it == byte);
    if !is(0, 0xFF) || greeting.get(9).is_some_and(|it| it & 1 == 0) {
        return Err(NO_ZMTP);
    }
    if greeting.get(10).is_some_and(|version| *version < 3) {
        return Err(OLD);
    }
    if !(12..32).all(|at| is(at, GREETING[at])) {
        return Err(MECHANISM);
    }
    Ok(())
}

/// Where a command's body begins and how long it is, as soon as its header has come.
fn command_extent(frame: &[u8]) -> Result<Option<(usize, usize)>, ProtocolError> {
    let Some(flags) = frame.first() else { return Ok(None) };
    if flags & !LONG != COMMAND {
        return Err(UNEXPECTED);
    }
    let (start, len) = if flags & LONG == 0 {
        let Some(len) = frame.get(1) else { return Ok(None) };
        (2, u64::from(*len))
    } else {
        let Some(len) = frame.get(1..MAX_HEADER_BYTES) else { return Ok(None) };
        (MAX_HEADER_BYTES, u64::from_be_bytes(len.try_into().expect("eight bytes")))
    };
    if len > MAX_COMMAND_BYTES as u64 {
        return Err(MALFORMED);
    }
    Ok(Some((start, len as usize)))
}

/// A command's name and the rest of it.
fn command(body: &[u8]) -> Result<(&[u8], &[u8]), ProtocolError> {
    let (len, rest) = body.split_first().ok_or(MALFORMED)?;
    rest.split_at_checked(usize::from(*len)).ok_or(MALFORMED)
}

fn check_ready(body: &[u8]) -> Result<(), ProtocolError> {
    let mut properties = match command(body)? {
        (b"READY", properties) => properties,
        (b"ERROR", _) => return Err(REFUSED),
        _ => return Err(UNEXPECTED),
    };
    while !properties.is_empty() {
        let (name, rest) = command(properties)?;
        let (len, rest) = rest.split_first_chunk().ok_or(MALFORMED)?;
        let len = u32::from_be_bytes(*len) as usize;
        let (value, rest) = rest.split_at_checked(len).ok_or(MALFORMED)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") && value == b"PULL" {
            return Ok(());
        }
        properties = rest;
    }
    Err(SOCKET_TYPE)
}

/// The context of a PING. Commands that a later version may know are passed over.
fn ping(body: &[u8]) -> Result<Option<Vec<u8>>, ProtocolError> {
    match command(body)? {
        (b"PING", arguments) => {
            let (_time_to_live, context) = arguments.split_first_chunk::<2>().ok_or(MALFORMED)?;
            Ok(Some(context.to_vec()))
        }
        (b"ERROR", _) => Err(REFUSED),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting_and_ready(socket_type: &[u8]) -> Vec<u8> {
        let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        ready.push(socket_type.len() as u8);
        ready.extend_from_slice(socket_type);
        let mut said = GREETING.to_vec();
        said.extend_from_slice(&[COMMAND, ready.len() as u8]);
        said.extend(ready);
        said
    }

    fn read(bytes: &[u8], piece: usize) -> Result<Vec<Said>, ProtocolError> {
        let (mut reader, mut said) = (Reader::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            reader.read(piece, |it| said.push(it))?;
        }
        Ok(said)
    }

    #[test]
    fn others_than_pull_sockets_are_refused_for_what_they_are() {
        let altered = |at: usize, byte: u8| {
            let mut bytes = greeting_and_ready(b"PULL");
            bytes[at] = byte;
            read(&bytes, 7)
        };
        assert_eq!(altered(0, b'G'), Err(NO_ZMTP));
        assert_eq!(altered(10, 1), Err(OLD));
        assert_eq!(altered(12, b'P'), Err(MECHANISM));
        assert_eq!(altered(64, 0), Err(UNEXPECTED));
        assert_eq!(read(&greeting_and_ready(b"PUSH"), 7), Err(SOCKET_TYPE));
        let refusing = [&GREETING[..], b"\x04\x07\x05ERROR\0"].concat();
        assert_eq!(read(&refusing, 7), Err(REFUSED));
    }
}
