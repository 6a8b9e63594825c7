//! Pushes messages to ZMQ's PULL sockets on the same host: ZMTP 3.1 with the NULL mechanism, as
//! <https://rfc.zeromq.org/spec/37/> has it.
//!
//! libzmq hands each message from the sender to a thread of its own, keeps any number of them, and
//! tells nobody of the peer's end. Here the sender writes into the socket itself, what waits is
//! bounded, and a peer that has gone is reported. Subscriptions, security and other patterns than
//! PUSH to PULL are left out.
//!
//! [`protocol`] knows bytes only; [`push`] has the socket, [`sockets`] all of an engine's.
#![forbid(unsafe_code)]

pub mod address;
pub mod protocol;
pub mod push;
pub mod sockets;
pub mod waiting;
