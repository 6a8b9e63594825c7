//! Doors for the fuzz targets in `rust/fuzz`: to what reads another process's words and is nobody
//! else's business.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use sparksched_backlog::Limits;

use crate::handshake::{HandshakeError, Hello, Reply};
use crate::link::{Link, Now, Peer};
use crate::segment::{BellPage, Segment, Side};

/// Reads a client's first packet, and writes what was understood.
///
/// # Errors
/// What the engine tells the client.
pub fn echo_hello(packet: &[u8], own_version: &str) -> Result<Vec<u8>, HandshakeError> {
    Hello::decode(packet, own_version).map(|hello| hello.encode())
}

/// Reads an engine's packet, and writes what was understood.
///
/// # Errors
/// What the client says of it.
pub fn echo_reply(packet: &[u8]) -> Result<Vec<u8>, HandshakeError> {
    Reply::decode(packet).map(|reply| reply.encode())
}

/// One side's end of a segment, as after a handshake.
///
/// # Panics
/// If the system has no memory or descriptors.
pub fn link(side: Side, segment: Segment, socket: OwnedFd, backlog: Limits) -> Link {
    let (bell, _) = BellPage::create().expect("a page");
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
    let peer = Peer { socket, pidfd: None, pid: 0 };
    Link::new(side, segment, Arc::new(bell), event, peer, backlog)
}

/// What a watcher does in each round.
pub fn beat(link: &Link, now_ms: u64, interval_ms: u64, since_ms: u64, stuck_after_ms: u64) {
    link.beat(Now { ms: now_ms, interval_ms }, since_ms, stuck_after_ms);
}

/// What a watcher does when the other process is gone.
pub fn note_gone(link: &Link) {
    link.note_gone();
}
