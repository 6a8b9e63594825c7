//! How a client gets to an engine's memory: four packets over a Unix socket.
//!
//! The engine listens under an abstract name, which vanishes with its process. The client says who
//! it is; the engine answers with descriptors of the memory, or with a reason why not; the client
//! says that it has mapped them and lacks nothing; the engine admits it. All that can fail is done
//! before the last packet, so that either both sides use the rings or neither. Each side knows the other's user from the kernel, and refuses any
//! but its own.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use sparksched_shm::ShmError;

use crate::credentials::{Credentials, peer_credentials};
use crate::link::Peer;
use crate::segment::LAYOUT_VERSION;

/// Changes with each change of the packets.
const PROTOCOL_VERSION: u32 = 1;
const MARK: &[u8; 8] = b"SPRKRING";
const MAX_PACKET_BYTES: usize = 4096;
const NUM_DESCRIPTORS: usize = 3;
/// A peer that is silent for longer in the middle of a handshake is given up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Why a client and an engine don't get together.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error(transparent)]
    Segment(#[from] ShmError),
    #[error("the other process belongs to user {peer}, this one to user {own}")]
    User { peer: u32, own: u32 },
    #[error("the other process runs sparksched {peer}, this one sparksched {own}")]
    Version { peer: String, own: String },
    #[error("the engine refuses: {0}")]
    Refused(String),
    /// The client was ready, and the engine didn't say whether it is. It may have admitted the client.
    #[error("the engine didn't answer within {0:?}")]
    Undecided(Duration),
    /// It has connected, and then said nothing for long, or while many others came.
    #[error("the other process said nothing")]
    Silent,
    #[error("the other process doesn't speak this protocol")]
    Gibberish,
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> HandshakeError {
    move |errno| HandshakeError::System { what, source: errno.into() }
}

/// A client's first packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) client_index: u32,
    /// The client's version of sparksched: both sides must be of the same.
    pub(crate) version: String,
}

/// What the engine answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// Segment, bell page and eventfd come with it.
    Welcome {
        ring_bytes: u64,
    },
    Refused(String),
    /// The last packet: the engine uses the rings from now on.
    Admitted,
}

fn preamble() -> Vec<u8> {
    let mut bytes = MARK.to_vec();
    bytes.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    bytes.extend_from_slice(&LAYOUT_VERSION.to_le_bytes());
    bytes
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = preamble();
        bytes.extend_from_slice(&self.client_index.to_le_bytes());
        bytes.extend_from_slice(self.version.as_bytes());
        bytes
    }

    /// Checks the packet and that it comes from the same version as `own_version`.
    pub(crate) fn decode(bytes: &[u8], own_version: &str) -> Result<Self, HandshakeError> {
        let rest = bytes.strip_prefix(MARK).ok_or(HandshakeError::Gibberish)?;
        let (versions, rest) = rest.split_at_checked(8).ok_or(HandshakeError::Gibberish)?;
        let (client_index, version) = rest.split_first_chunk().ok_or(HandshakeError::Gibberish)?;
        let version = String::from_utf8_lossy(version).into_owned();
        let own_versions = &preamble()[MARK.len()..];
        if versions != own_versions {
            // Of the same version perhaps, but built from another source.
            let named = |version: &str, numbers: &[u8]| {
                let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
                let (protocol, layout) = (number(&numbers[..4]), number(&numbers[4..]));
                format!("{version} (protocol {protocol}, layout {layout})")
            };
            return Err(HandshakeError::Version {
                peer: named(&version, versions),
                own: named(own_version, own_versions),
            });
        }
        if version != own_version {
            return Err(HandshakeError::Version { peer: version, own: own_version.to_owned() });
        }
        Ok(Self { client_index: u32::from_le_bytes(*client_index), version })
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MARK.to_vec();
        match self {
            Self::Welcome { ring_bytes } => {
                bytes.push(0);
                bytes.extend_from_slice(&ring_bytes.to_le_bytes());
            }
            Self::Refused(reason) => {
                bytes.push(1);
                bytes.extend_from_slice(reason.as_bytes());
            }
            Self::Admitted => bytes.push(2),
        }
        bytes.truncate(MAX_PACKET_BYTES);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let rest = bytes.strip_prefix(MARK).ok_or(HandshakeError::Gibberish)?;
        match rest {
            [0, ring_bytes @ ..] => {
                let ring_bytes = ring_bytes.try_into().map_err(|_| HandshakeError::Gibberish)?;
                Ok(Self::Welcome { ring_bytes: u64::from_le_bytes(ring_bytes) })
            }
            [1, reason @ ..] => Ok(Self::Refused(String::from_utf8_lossy(reason).into_owned())),
            [2] => Ok(Self::Admitted),
            _ => Err(HandshakeError::Gibberish),
        }
    }
}

/// The descriptors that go with a welcome.
pub(crate) struct Descriptors<Fd> {
    pub(crate) segment: Fd,
    pub(crate) bell: Fd,
    pub(crate) client_event: Fd,
}

fn seqpacket(flags: SocketFlags) -> Result<OwnedFd, HandshakeError> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)
        .map_err(system("a Unix socket can't be made"))
}

fn address(name: &str) -> Result<SocketAddrUnix, HandshakeError> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(system("the name is too long"))
}

/// A socket on which clients find the engine under an abstract name.
pub(crate) fn listen(name: &str) -> Result<OwnedFd, HandshakeError> {
    let socket = seqpacket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &address(name)?).map_err(system("the name can't be bound"))?;
    rustix::net::listen(&socket, 128).map_err(system("the socket can't listen"))?;
    Ok(socket)
}

/// The peer behind a connected socket, if it is of our user.
fn identify(socket: OwnedFd) -> Result<Peer, HandshakeError> {
    let Credentials { pid, uid } = peer_credentials(socket.as_fd()).map_err(|source| {
        HandshakeError::System { what: "the peer can't be identified", source }
    })?;
    let own = geteuid().as_raw();
    if uid != own {
        return Err(HandshakeError::User { peer: uid, own });
    }
    // Without it (before Linux 5.3, in another PID namespace) the socket alone tells of the end.
    let pidfd = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    Ok(Peer { socket, pidfd, pid })
}

/// Has calls that send on a socket, or connect it, give up after a while.
fn limit_patience(socket: &OwnedFd) -> Result<(), HandshakeError> {
    set_socket_timeout(socket, Timeout::Send, Some(PATIENCE))
        .map_err(system("a time limit can't be set"))
}

fn send_packet(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), HandshakeError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(NUM_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let packet = [IoSlice::new(packet)];
    // A signal, or a stop of this process, interrupts a call that has a time limit.
    retry_on_intr(|| sendmsg(socket, &packet, &mut ancillary, SendFlags::NOSIGNAL))
        .map_err(system("the peer can't be written to"))?;
    Ok(())
}

/// Waits until there is something to receive, time is up, or something else ends the wait.
fn wait_for_packet(socket: BorrowedFd<'_>, deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).ok();
    // If it fails, for want of memory or because of a signal, the caller looks again.
    let _ = poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], timeout.as_ref());
}

fn receive_packet(socket: BorrowedFd<'_>) -> Result<(Vec<u8>, Vec<OwnedFd>), HandshakeError> {
    let mut packet = vec![0; MAX_PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(NUM_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    // A socket's own time limit begins anew when a signal, or a stop of this process, interrupts
    // the call: a silent peer would never be given up.
    let deadline = Instant::now() + PATIENCE;
    let received = loop {
        let buffers = &mut [IoSliceMut::new(&mut packet)];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(socket, buffers, &mut ancillary, flags) {
            Err(Errno::AGAIN) if Instant::now() < deadline => wait_for_packet(socket, deadline),
            Err(Errno::INTR) => {}
            received => break received.map_err(system("the peer can't be read from"))?,
        }
    };
    packet.truncate(received.bytes);
    let descriptors: Vec<_> = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => rights.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    if packet.is_empty() {
        return Err(system("the peer hung up")(Errno::CONNRESET));
    }
    // The kernel drops descriptors for which the process has no room, and says no more than this.
    if received.flags.contains(ReturnFlags::CTRUNC) && descriptors.len() < NUM_DESCRIPTORS {
        return Err(system("the peer's descriptors can't be received")(Errno::MFILE));
    }
    Ok((packet, descriptors))
}

/// The next connection, if there is one. Waits for nobody: the listener doesn't block.
///
/// # Errors
/// If the system has no room for it; it stays in the queue.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<Option<OwnedFd>, HandshakeError> {
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            // It has given up before its turn came; another may be behind it.
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::AGAIN) => return Ok(None),
            accepted => return accepted.map(Some).map_err(system("a client can't be accepted")),
        }
    }
}

/// Who is behind a connection, as far as the kernel knows.
///
/// # Errors
/// [`HandshakeError::User`] above all: then nobody is to answer.
pub(crate) fn greet(socket: OwnedFd) -> Result<Peer, HandshakeError> {
    limit_patience(&socket)?;
    identify(socket)
}

/// What a client says first.
pub(crate) fn hear(peer: &Peer, own_version: &str) -> Result<Hello, HandshakeError> {
    let (packet, _) = receive_packet(peer.socket.as_fd())?;
    Hello::decode(&packet, own_version).inspect_err(|error| refuse(peer, &error.to_string()))
}

pub(crate) fn refuse(peer: &Peer, reason: &str) {
    // The client may be gone; then there is nobody to tell.
    let _ = send_packet(peer.socket.as_fd(), &Reply::Refused(reason.to_owned()).encode(), &[]);
}

/// The engine's second packet; returns once the client has mapped the memory.
pub(crate) fn welcome(
    peer: &Peer,
    ring_bytes: usize,
    descriptors: &Descriptors<BorrowedFd<'_>>,
) -> Result<(), HandshakeError> {
    let reply = Reply::Welcome { ring_bytes: ring_bytes as u64 }.encode();
    let Descriptors { segment, bell, client_event } = descriptors;
    send_packet(peer.socket.as_fd(), &reply, &[*segment, *bell, *client_event])?;
    crate::points::reach("welcome-sent");
    let (packet, _) = receive_packet(peer.socket.as_fd())?;
    if packet == MARK { Ok(()) } else { Err(HandshakeError::Gibberish) }
}

/// The client's part up to the answer: the engine, the size of its rings, and their memory.
pub(crate) fn connect(
    name: &str,
    hello: &Hello,
) -> Result<(Peer, u64, Descriptors<OwnedFd>), HandshakeError> {
    let socket = seqpacket(SocketFlags::empty())?;
    limit_patience(&socket)?;
    let address = address(name)?;
    retry_on_intr(|| rustix::net::connect(&socket, &address))
        .map_err(system("the engine can't be reached"))?;
    let peer = identify(socket)?;
    send_packet(peer.socket.as_fd(), &hello.encode(), &[])?;
    crate::points::reach("hello-sent");
    let (packet, descriptors) = receive_packet(peer.socket.as_fd())?;
    let ring_bytes = match Reply::decode(&packet)? {
        Reply::Welcome { ring_bytes } => ring_bytes,
        Reply::Refused(reason) => return Err(HandshakeError::Refused(reason)),
        Reply::Admitted => return Err(HandshakeError::Gibberish),
    };
    let [segment, bell, client_event] = <[OwnedFd; NUM_DESCRIPTORS]>::try_from(descriptors)
        .map_err(|_| HandshakeError::Gibberish)?;
    Ok((peer, ring_bytes, Descriptors { segment, bell, client_event }))
}

/// The engine's last packet.
pub(crate) fn admit(peer: &Peer) -> Result<(), HandshakeError> {
    send_packet(peer.socket.as_fd(), &Reply::Admitted.encode(), &[])
}

/// The client's last packet, and the engine's: returns once both sides use the rings.
pub(crate) fn confirm(peer: &Peer) -> Result<(), HandshakeError> {
    send_packet(peer.socket.as_fd(), MARK, &[])?;
    crate::points::reach("confirmed");
    match receive_packet(peer.socket.as_fd()) {
        Ok((packet, _)) => match Reply::decode(&packet)? {
            Reply::Admitted => Ok(()),
            Reply::Refused(reason) => Err(HandshakeError::Refused(reason)),
            Reply::Welcome { .. } => Err(HandshakeError::Gibberish),
        },
        // If the engine hung up, it has admitted nobody; if it is silent, it may still do so.
        Err(HandshakeError::System { source, .. }) if source.kind() == ErrorKind::WouldBlock => {
            Err(HandshakeError::Undecided(PATIENCE))
        }
        Err(error) => Err(error),
    }
}
