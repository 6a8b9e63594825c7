//! The form of a message; that its bytes are vLLM's is held by `tests/unit/test_encoder.py`.

use sparksched_core::{Event, EventKind, RequestNews};
use sparksched_wire::{Envelope, Message, Output, RequestId, Stats};

const ENVELOPE: Envelope<'_> = Envelope {
    engine_index: 0,
    scheduler_stats: Stats::None,
    timestamp: 1.5,
    finished_requests: None,
    weight_version: Some("default"),
};

fn push(message: &mut Message, news: Option<&RequestNews>) {
    message.push(&Output {
        request_id: &RequestId::new("ab"),
        new_token_ids: &[1, 300],
        news,
        finish_reason: None,
        num_nans_in_logits: 0,
    });
}

const OUTPUT: &[u8] =
    b"\xdc\x00\x12\xa2ab\x92\x01\xcd\x01\x2c\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0\x00\xc0\xc0\xc0\xc0";
const TAIL: &[u8] = b"\xc0\xcb\x3f\xf8\0\0\0\0\0\0\xc0\xc0\xc0\xc0\xa7default";

#[test]
fn a_plain_output_is_an_array_of_all_fields() {
    let mut message = Message::default();
    push(&mut message, None);
    assert_eq!(message.bytes(&ENVELOPE), [b"\x99\x00\x91", OUTPUT, TAIL].concat());
}

#[test]
fn an_output_without_news_is_one_whose_news_are_empty() {
    let mut message = Message::default();
    push(&mut message, Some(&RequestNews::default()));
    assert_eq!(message.bytes(&ENVELOPE), [b"\x99\x00\x91", OUTPUT, TAIL].concat());
}

#[test]
fn fields_that_a_later_release_has_added_are_none() {
    let mut message = Message::new(19, 0);
    push(&mut message, None);
    let output = [b"\xdc\x00\x13", &OUTPUT[3..], b"\xc0"].concat();
    assert_eq!(message.bytes(&ENVELOPE), [b"\x99\x00\x91", &output[..], TAIL].concat());
}

#[test]
fn a_message_may_grow_after_it_was_read() {
    let mut message = Message::default();
    assert_eq!(message.bytes(&ENVELOPE), [b"\x99\x00\x90", TAIL].concat());
    for _ in 0..16 {
        push(&mut message, None);
        message.bytes(&ENVELOPE);
    }
    message.push_encoded(OUTPUT);
    // The head is longer now: more outputs, and another engine.
    let envelope = Envelope { engine_index: 1 << 40, ..ENVELOPE };
    let head = b"\x99\xcf\0\0\x01\0\0\0\0\0\xdc\x00\x11";
    assert_eq!(message.bytes(&envelope), [&head[..], &OUTPUT.repeat(17), TAIL].concat());
}

#[test]
fn events_are_maps() {
    let mut message = Message::default();
    let event = Event { kind: EventKind::Preempted, timestamp: 1.5 };
    let news = RequestNews { events: vec![event], ..RequestNews::default() };
    push(&mut message, Some(&news));
    let event = b"\x91\x82\xa4type\x03\xa9timestamp\xcb\x3f\xf8\0\0\0\0\0\0\xc0";
    let bytes = message.bytes(&ENVELOPE);
    assert!(bytes.windows(event.len()).any(|part| part == event), "{bytes:x?}");
}
