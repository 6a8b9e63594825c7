//! Shared-memory byte queues between an API server and an engine on one Linux host.
//!
//! From the bottom up: [`ring`] moves bytes, [`bell`] puts a reader to sleep and wakes it,
//! [`message`] gives the bytes limits and [`outbox`] holds what the ring has no room for. On these,
//! [`segment`] lays out the memory that two processes share, [`handshake`] passes it from one to the
//! other, [`link`](mod@link) is one end of it, [`watcher`] learns when the other end has died, and
//! [`engine`] and [`client`] are what the two processes hold.
//!
//! It knows nothing of Python or of what the messages say. All `unsafe` is in [`ring`],
//! [`segment`] and `credentials`.
// Of what models leave out, parts stay that nothing else calls.
#![cfg_attr(feature = "loom", expect(dead_code))]

#[cfg(not(target_os = "linux"))]
compile_error!("sparksched needs Linux: its rings are sealed memfds, with futexes and eventfds");

pub mod bell;
pub mod message;
pub mod outbox;
pub mod points;
pub mod ring;

#[cfg(not(feature = "loom"))]
pub mod client;
#[cfg(not(feature = "loom"))]
mod credentials;
#[cfg(not(feature = "loom"))]
pub mod engine;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(not(feature = "loom"))]
pub mod handshake;
#[cfg(not(feature = "loom"))]
pub mod link;
#[cfg(not(feature = "loom"))]
pub mod segment;
#[cfg(not(feature = "loom"))]
pub mod watcher;
