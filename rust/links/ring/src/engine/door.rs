//! An engine's door: whoever has connected, until it has said who it is.
//!
//! The watcher's thread answers, and nobody makes it wait. Another user's process is turned away at
//! once. One of this user's that says nothing costs a descriptor, and there is a limit to those. A
//! thread is for clients that the engine has a place for.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Shared;
use crate::handshake::{self, HandshakeError, PATIENCE};
use crate::link::Peer;
use crate::watcher::{Door, Mailbox};

/// How many connections are answered before the watcher's other work gets its turn.
const MAX_ANSWERS: usize = 128;

/// How many may have said nothing yet. The oldest goes when there are more: a client of ours speaks as
/// soon as it has connected.
const MAX_SILENT: usize = 64;

/// How long the door stays shut when the system has no room for a connection, and how long at least
/// from one report on other users to the next.
const PAUSE: Duration = Duration::from_secs(1);

const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// One of this user's that has said nothing yet.
struct Guest {
    peer: Peer,
    since: Instant,
}

/// Other users' connections that haven't been reported.
#[derive(Default)]
struct Strangers {
    count: u64,
    last: Option<HandshakeError>,
    reported_at: Option<Instant>,
}

impl Strangers {
    fn note(&mut self, error: HandshakeError) {
        self.count += 1;
        self.last = Some(error);
    }

    /// What there is to say of them, if it is time.
    fn report(&mut self, now: Instant) -> Option<String> {
        if self.reported_at.is_some_and(|time| now < time + PAUSE) {
            return None;
        }
        let error = self.last.take()?;
        self.reported_at = Some(now);
        Some(match std::mem::take(&mut self.count) {
            1 => error.to_string(),
            count => format!("{error}; {} more were turned away, too", count - 1),
        })
    }
}

/// Lets clients in.
pub(super) struct EngineDoor {
    listener: OwnedFd,
    shared: Arc<Shared>,
    /// The oldest first.
    silent: VecDeque<Guest>,
    strangers: Strangers,
    shut_until: Option<Instant>,
}

impl Door for EngineDoor {
    fn knocks(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listener = (!self.is_shut(Instant::now())).then(|| self.listener.as_fd());
        listener.into_iter().chain(self.silent.iter().map(|guest| guest.peer.socket.as_fd()))
    }

    fn answer(&mut self, mailbox: &Arc<Mailbox>) {
        let now = Instant::now();
        if self.is_shut(now) {
            crate::points::reach(crate::points::SHUT);
        } else {
            self.accept(now);
        }
        self.hear(now, mailbox);
        while self.silent.len() > MAX_SILENT {
            self.silent.pop_front();
            self.shared.refuse(&HandshakeError::Silent);
        }
        if let Some(report) = self.strangers.report(now) {
            self.shared.refuse(&report);
        }
        self.shared.report_traffic();
    }
}

impl EngineDoor {
    pub(super) fn new(listener: OwnedFd, shared: Arc<Shared>) -> Self {
        let (silent, strangers) = (VecDeque::new(), Strangers::default());
        Self { listener, shared, silent, strangers, shut_until: None }
    }

    fn is_shut(&self, now: Instant) -> bool {
        self.shut_until.is_some_and(|time| now < time)
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..MAX_ANSWERS {
            match handshake::accept(self.listener.as_fd()) {
                Ok(None) => return,
                Ok(Some(socket)) => match handshake::greet(socket) {
                    Ok(peer) => self.silent.push_back(Guest { peer, since: now }),
                    Err(error @ HandshakeError::User { .. }) => self.strangers.note(error),
                    Err(error) => self.shared.refuse(&error),
                },
                // The system takes a descriptor before it looks whether anybody waits.
                Err(_) if !self.somebody_waits() => return,
                Err(error) => {
                    self.shared.refuse(&error);
                    self.shut_until = Some(now + PAUSE);
                    return;
                }
            }
        }
    }

    fn somebody_waits(&self) -> bool {
        let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
        // If it fails, there is no telling: what made `accept` fail is worth a report.
        poll(&mut fds, Some(&NOW)).map_or(true, |num_ready| num_ready > 0)
    }

    /// Hears those who have spoken or hung up, and gives up those who have been silent for too long.
    fn hear(&mut self, now: Instant, mailbox: &Arc<Mailbox>) {
        let socket = |guest| {
            let Guest { peer, .. }: &Guest = guest;
            PollFd::from_borrowed_fd(peer.socket.as_fd(), PollFlags::IN)
        };
        let mut fds: Vec<_> = self.silent.iter().map(socket).collect();
        // If it fails, nobody has spoken yet.
        let _ = poll(&mut fds, Some(&NOW));
        let spoke: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (guest, has_spoken) in std::mem::take(&mut self.silent).into_iter().zip(spoke) {
            if has_spoken {
                self.admit(guest.peer, mailbox);
            } else if now.saturating_duration_since(guest.since) >= PATIENCE {
                self.shared.refuse(&HandshakeError::Silent);
            } else {
                self.silent.push_back(guest);
            }
        }
    }

    fn admit(&self, peer: Peer, mailbox: &Arc<Mailbox>) {
        let client = match self.shared.claim(&peer) {
            Ok(client) => client,
            Err(error) => return self.shared.refuse(&error),
        };
        // In a thread of its own: the client may take its time.
        let (shared, mailbox) = (Arc::clone(&self.shared), Arc::clone(mailbox));
        let admission = move || match shared.admit(peer, client) {
            Ok(link) => mailbox.deliver(link),
            Err(error) => shared.refuse(&error),
        };
        let thread = std::thread::Builder::new().name("sparksched-admit".to_owned());
        if let Err(error) = thread.spawn(admission) {
            self.shared.give_back(client);
            self.shared.refuse(&format!("no thread to admit it: {error}"));
        }
    }
}
