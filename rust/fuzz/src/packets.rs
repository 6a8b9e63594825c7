//! A handshake's packets: whatever they are, they are understood as they are meant or refused, and
//! what a client is told of a refusal can be read.

use sparksched_ring::fuzzing::{echo_hello, echo_reply};
use sparksched_ring::segment::LAYOUT_VERSION;

const OWN_VERSION: &str = "0.1.0";
const MARK: &[u8] = b"SPRKRING";
const MAX_PACKET_BYTES: usize = 4096;

fn check_hello(packet: &[u8]) {
    let preamble = [MARK, &1u32.to_le_bytes(), &LAYOUT_VERSION.to_le_bytes()].concat();
    let is_ours = packet
        .strip_prefix(&preamble[..])
        .is_some_and(|rest| rest.get(4..) == Some(OWN_VERSION.as_bytes()));
    match echo_hello(packet, OWN_VERSION) {
        Ok(echo) => {
            assert!(is_ours, "a stranger is let in");
            assert_eq!(echo, packet, "a hello is misunderstood");
        }
        Err(reason) => {
            assert!(!is_ours, "a client of this version is told: {reason}");
            check_reply(&[MARK, &[1], reason.to_string().as_bytes()].concat());
        }
    }
}

fn check_reply(packet: &[u8]) {
    let is_a_reply = packet.strip_prefix(MARK).is_some_and(|rest| match rest {
        [0, ring_bytes @ ..] => ring_bytes.len() == 8,
        [1, ..] | [2] => true,
        _ => false,
    });
    match echo_reply(packet) {
        Ok(echo) => {
            assert!(is_a_reply, "something else is taken for a reply");
            // What is no text in a reason is replaced.
            if str::from_utf8(&packet[MARK.len()..]).is_ok() || packet[MARK.len()] != 1 {
                assert_eq!(echo, packet[..packet.len().min(MAX_PACKET_BYTES)]);
            }
        }
        Err(reason) => assert!(!is_a_reply, "a reply is not understood: {reason}"),
    }
}

/// Takes a packet for either side's.
pub fn check(packet: &[u8]) {
    check_hello(packet);
    check_reply(packet);
}
