//! `EngineCoreOutputs` of one client and the `EngineCoreOutput`s in it.

use sparksched_core::{Event, EventKind, RequestNews, StopReason};

use crate::msgpack::Writer;
use crate::stats::{self, Stats};

/// Fields of `EngineCoreOutputs`; all of them are written.
const NUM_MESSAGE_FIELDS: usize = 9;

/// Fields of `EngineCoreOutput` in vLLM 0.32.0. All of them are written, and so are those behind
/// them that later releases have added: None in whatever the core knows of a request.
const NUM_OUTPUT_FIELDS: usize = 18;

/// Longest form of what stands before the first output: two array headers and the engine's index.
const MAX_HEAD_BYTES: usize = 1 + 9 + 5;

/// What clients call a repetition that ends a request.
const REPETITION: &str = "repetition_detected";

/// A request's id as msgpack, encoded once.
#[derive(Clone, Debug)]
pub struct RequestId(Box<[u8]>);

impl RequestId {
    pub fn new(id: &str) -> Self {
        let mut writer = Writer::new(Vec::with_capacity(id.len() + 5));
        writer.str(id);
        Self(writer.bytes().into())
    }
}

/// One request's share of a message.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    pub request_id: &'a RequestId,
    /// The tokens that its client is to get.
    pub new_token_ids: &'a [i32],
    /// What there is to tell besides, if there is anything.
    pub news: Option<&'a RequestNews>,
    /// The number of the `FinishReason`, if the request has ended.
    pub finish_reason: Option<u8>,
    /// NaNs among its logits, as the model runner counts them.
    pub num_nans_in_logits: i64,
}

/// What concerns no single request.
#[derive(Clone, Copy, Debug)]
pub struct Envelope<'a> {
    /// Which of several engines sends the message.
    pub engine_index: i64,
    /// The scheduler's state.
    pub scheduler_stats: Stats<'a>,
    /// When the outputs were known, in seconds of the engine's monotonic clock.
    pub timestamp: f64,
    /// Requests of this client that ended since the last message, if its front end asks for them.
    pub finished_requests: Option<&'a [String]>,
    /// Which weights the step was computed with.
    pub weight_version: Option<&'a str>,
}

/// A message that grows output by output.
///
/// The buffer begins with room for a head, which can be written only when all outputs are there,
/// and ends with a tail that is written anew each time the message is asked for.
#[derive(Debug)]
pub struct Message {
    writer: Writer,
    num_outputs: usize,
    outputs_end: usize,
    /// Fields of `EngineCoreOutput`.
    num_output_fields: usize,
    /// All fields behind the tokens, if there is nothing to tell but these: nearly all outputs.
    plain_fields: Vec<u8>,
}

impl Message {
    /// An empty message of outputs that have so many fields, with room for so many bytes.
    ///
    /// # Panics
    /// If there are fewer fields than are known.
    pub fn new(num_output_fields: usize, num_bytes: usize) -> Self {
        assert!(num_output_fields >= NUM_OUTPUT_FIELDS, "vLLM's outputs have lost a field");
        let mut buffer = Vec::with_capacity(MAX_HEAD_BYTES + num_bytes);
        buffer.resize(MAX_HEAD_BYTES, 0);
        Self {
            writer: Writer::new(buffer),
            num_outputs: 0,
            outputs_end: MAX_HEAD_BYTES,
            num_output_fields,
            plain_fields: plain_fields(num_output_fields),
        }
    }

    /// Adds a request's output.
    pub fn push(&mut self, output: &Output<'_>) {
        self.truncate_tail();
        let to = &mut self.writer;
        to.array(self.num_output_fields);
        to.encoded(&output.request_id.0);
        to.array(output.new_token_ids.len());
        for &token in output.new_token_ids {
            to.int(token.into());
        }
        if output.news.is_none() && output.num_nans_in_logits == 0 {
            to.encoded(&self.plain_fields);
        } else {
            write_fields(to, output, self.num_output_fields);
        }
        self.note_output();
    }

    /// Adds an `EngineCoreOutput` that is msgpack already.
    pub fn push_encoded(&mut self, output: &[u8]) {
        self.truncate_tail();
        self.writer.encoded(output);
        self.note_output();
    }

    /// The whole message; more may be added and it may be asked for again.
    pub fn bytes(&mut self, envelope: &Envelope<'_>) -> &[u8] {
        self.truncate_tail();
        write_tail(&mut self.writer, envelope);
        let mut head = Writer::new(Vec::with_capacity(MAX_HEAD_BYTES));
        head.array(NUM_MESSAGE_FIELDS);
        head.int(envelope.engine_index);
        head.array(self.num_outputs);
        let head = head.bytes();
        let start = MAX_HEAD_BYTES - head.len();
        self.writer.bytes_mut()[start..MAX_HEAD_BYTES].copy_from_slice(head);
        &self.writer.bytes()[start..]
    }

    fn truncate_tail(&mut self) {
        self.writer.bytes_mut().truncate(self.outputs_end);
    }

    fn note_output(&mut self) {
        self.num_outputs += 1;
        self.outputs_end = self.writer.bytes().len();
    }
}

fn write_tail(to: &mut Writer, envelope: &Envelope<'_>) {
    envelope.scheduler_stats.write(to);
    to.float(envelope.timestamp);
    to.nil(); // utility_output
    match envelope.finished_requests {
        None => to.nil(),
        Some(ids) => {
            to.array(ids.len());
            for id in ids {
                to.str(id);
            }
        }
    }
    to.nil(); // wave_complete
    to.nil(); // start_wave
    match envelope.weight_version {
        None => to.nil(),
        Some(version) => to.str(version),
    }
}

fn plain_fields(num_output_fields: usize) -> Vec<u8> {
    let request_id = &RequestId::new("");
    let plain = Output {
        request_id,
        new_token_ids: &[],
        news: None,
        finish_reason: None,
        num_nans_in_logits: 0,
    };
    let mut writer = Writer::new(Vec::new());
    write_fields(&mut writer, &plain, num_output_fields);
    writer.bytes().to_vec()
}

/// Writes all fields behind the tokens.
fn write_fields(to: &mut Writer, output: &Output<'_>, num_output_fields: usize) {
    let nothing = RequestNews::default();
    let news = output.news.unwrap_or(&nothing);
    to.nil(); // new_logprobs
    to.nil(); // new_prompt_logprobs_tensors
    to.nil(); // pooling_output
    match output.finish_reason {
        None => to.nil(),
        Some(reason) => to.uint(reason.into()),
    }
    match news.stop_reason {
        StopReason::None => to.nil(),
        StopReason::Token(token) => to.int(token.into()),
        StopReason::Repetition => to.str(REPETITION),
    }
    write_events(to, &news.events);
    to.nil(); // kv_transfer_params
    to.nil(); // ec_transfer_params
    to.nil(); // trace_headers
    match &news.prefill_stats {
        None => to.nil(),
        Some(prefill_stats) => stats::prefill_stats(to, prefill_stats),
    }
    to.nil(); // routed_experts
    to.int(output.num_nans_in_logits);
    to.nil(); // mm_cache_miss_hashes
    to.nil(); // new_sampling_mask
    match &news.spec_stats {
        None => to.nil(),
        Some(spec_stats) => stats::request_spec_stats(to, spec_stats),
    }
    to.nil(); // prompt_token_id_logprobs
    (NUM_OUTPUT_FIELDS..num_output_fields).for_each(|_| to.nil());
}

fn write_events(to: &mut Writer, events: &[Event]) {
    if events.is_empty() {
        to.nil();
        return;
    }
    to.array(events.len());
    for event in events {
        to.map(2);
        to.str("type");
        to.uint(match event.kind {
            EventKind::Queued => 1,
            EventKind::Scheduled => 2,
            EventKind::Preempted => 3,
        });
        to.str("timestamp");
        to.float(event.timestamp);
    }
}
