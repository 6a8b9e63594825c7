//! Whatever a step brings: the message of it is msgpack, says what it was given, and says it in the
//! shortest form.

use arbitrary::{Arbitrary, Unstructured};
use rmpv::Value;
use sparksched_core::{
    Event, EventKind, PrefillStats, PrefixCacheStats, RequestNews, RequestSpecStats,
    SchedulerStats, SpecDecodingStats, StopReason,
};
use sparksched_wire::{Envelope, Message, Output, RequestId, Stats};

/// Fields of an output that vLLM 0.32.0 has.
const NUM_KNOWN_FIELDS: usize = 18;

#[derive(Arbitrary, Debug)]
enum AnyStop {
    None,
    Token(i32),
    Repetition,
}

/// Steps by accepted tokens, drafted tokens, and both of each step.
type AnyRequestSpec = (Vec<u64>, u64, Vec<(u32, u32)>);

#[derive(Arbitrary, Debug)]
struct AnyNews {
    stop: AnyStop,
    events: Vec<(u8, f64)>,
    prefill: Option<AnyPrefill>,
    spec: Option<AnyRequestSpec>,
}

/// How a prompt was computed; the core finds no more in caches than the prompt has.
#[derive(Arbitrary, Debug)]
struct AnyPrefill {
    computed: u16,
    local: u32,
    external: i32,
    created: u32,
}

#[derive(Arbitrary, Debug)]
struct AnyOutput {
    request_id: String,
    tokens: Vec<i32>,
    news: Option<AnyNews>,
    finish_reason: Option<u8>,
    num_nans: i64,
}

#[derive(Arbitrary, Debug)]
struct AnyStats {
    queues: [u32; 3],
    usage: Option<f64>,
    is_reset: bool,
    prefix_cache: [u64; 6],
    spec: Option<AnySpec>,
    fetch_stages: Vec<String>,
}

/// Drafts, their tokens, those accepted; and accepted and drafted tokens by position.
type AnySpec = ([u64; 3], Vec<(u64, u64)>);

#[derive(Arbitrary, Debug)]
struct AnyEnvelope {
    engine_index: i64,
    stats: Option<AnyStats>,
    timestamp: f64,
    finished: Option<Vec<String>>,
    weight_version: Option<String>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Push(AnyOutput),
    /// What Python's encoder has made of an output.
    PushEncoded(Vec<u8>),
    Read(AnyEnvelope),
}

/// How many fields an output has beyond those, and what happens to a message.
#[derive(Arbitrary, Debug)]
pub struct Input(u8, Vec<Step>);

fn map(fields: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    Value::Map(fields.into_iter().map(|(name, value)| (name.into(), value)).collect())
}

fn array<T: Into<Value>>(values: impl IntoIterator<Item = T>) -> Value {
    Value::Array(values.into_iter().map(Into::into).collect())
}

fn or_nil<T: Into<Value>>(value: Option<T>) -> Value {
    value.map_or(Value::Nil, Into::into)
}

impl AnyPrefill {
    fn num_cached(&self) -> u32 {
        self.local.saturating_add_signed(self.external)
    }

    fn num_prompt(&self) -> u32 {
        self.num_cached().saturating_add(self.computed.into())
    }

    fn stats(&self) -> PrefillStats {
        PrefillStats {
            num_prompt_tokens: self.num_prompt(),
            num_local_cached_tokens: self.local,
            num_external_cached_tokens: self.external,
            num_cache_creation_tokens: self.created,
        }
    }

    fn expected(&self) -> Value {
        map([
            ("num_prompt_tokens", self.num_prompt().into()),
            ("num_computed_tokens", (self.num_prompt() - self.num_cached()).into()),
            ("num_cached_tokens", self.num_cached().into()),
            ("num_local_cached_tokens", self.local.into()),
            ("num_external_cached_tokens", self.external.into()),
            ("num_cache_creation_tokens", self.created.into()),
        ])
    }
}

impl AnyNews {
    fn news(&self) -> RequestNews {
        let event = |&(kind, timestamp): &(u8, f64)| {
            let kinds = [EventKind::Queued, EventKind::Scheduled, EventKind::Preempted];
            Event { kind: kinds[usize::from(kind) % 3], timestamp }
        };
        RequestNews {
            stop_reason: match self.stop {
                AnyStop::None => StopReason::None,
                AnyStop::Token(token) => StopReason::Token(token),
                AnyStop::Repetition => StopReason::Repetition,
            },
            events: self.events.iter().map(event).collect(),
            prefill_stats: self.prefill.as_ref().map(AnyPrefill::stats),
            spec_stats: self.spec.as_ref().map(|(accepted, drafted, per_step)| {
                let mut stats = RequestSpecStats::new(accepted.len() as u32);
                stats.histogram[..accepted.len()].copy_from_slice(accepted);
                stats.num_draft_tokens = *drafted;
                stats.per_step.clone_from(per_step);
                Box::new(stats)
            }),
            ..RequestNews::default()
        }
    }

    fn stop_reason(&self) -> Value {
        match self.stop {
            AnyStop::None => Value::Nil,
            AnyStop::Token(token) => token.into(),
            AnyStop::Repetition => "repetition_detected".into(),
        }
    }

    fn events(&self) -> Value {
        let event = |&(kind, timestamp): &(u8, f64)| {
            map([("type", (1 + kind % 3).into()), ("timestamp", timestamp.into())])
        };
        if self.events.is_empty() { Value::Nil } else { array(self.events.iter().map(event)) }
    }

    fn spec_stats(&self) -> Value {
        let Some((accepted, drafted, per_step)) = &self.spec else { return Value::Nil };
        map([
            ("num_spec_tokens", accepted.len().into()),
            ("histogram", array(accepted.iter().copied().chain([0]))),
            ("num_draft_tokens", (*drafted).into()),
            ("per_step_accepted", array(per_step.iter().map(|step| step.0))),
            ("per_step_drafted", array(per_step.iter().map(|step| step.1))),
        ])
    }
}

impl AnyOutput {
    fn push(&self, message: &mut Message) {
        let news = self.news.as_ref().map(AnyNews::news);
        message.push(&Output {
            request_id: &RequestId::new(&self.request_id),
            new_token_ids: &self.tokens,
            news: news.as_ref(),
            // No output ends a request without telling why.
            finish_reason: self.finish_reason.filter(|_| news.is_some()),
            num_nans_in_logits: self.num_nans,
        });
    }

    fn expected(&self, num_fields: usize) -> Value {
        let mut fields = vec![Value::Nil; num_fields];
        fields[0] = self.request_id.as_str().into();
        fields[1] = array(self.tokens.iter().copied());
        fields[13] = self.num_nans.into();
        if let Some(news) = &self.news {
            fields[5] = or_nil(self.finish_reason);
            fields[6] = news.stop_reason();
            fields[7] = news.events();
            fields[11] = news.prefill.as_ref().map_or(Value::Nil, AnyPrefill::expected);
            fields[16] = news.spec_stats();
        }
        Value::Array(fields)
    }
}

impl AnyStats {
    fn stats(&self) -> SchedulerStats {
        let [running, waiting, skipped] = self.queues.map(|count| count as usize);
        let [requests, queries, hits, preempted_requests, preempted_queries, preempted_hits] =
            self.prefix_cache;
        SchedulerStats {
            num_running_reqs: running,
            num_waiting_reqs: waiting,
            num_skipped_waiting_reqs: skipped,
            kv_cache_usage: self.usage,
            prefix_cache_stats: PrefixCacheStats {
                reset: self.is_reset,
                requests,
                queries,
                hits,
                preempted_requests,
                preempted_queries,
                preempted_hits,
            },
            spec_decoding_stats: self.spec.as_ref().map(|(counts, positions)| SpecDecodingStats {
                num_drafts: counts[0],
                num_draft_tokens: counts[1],
                num_accepted_tokens: counts[2],
                num_accepted_tokens_per_pos: positions.iter().map(|it| it.0).collect(),
                num_draft_tokens_per_pos: positions.iter().map(|it| it.1).collect(),
            }),
        }
    }

    fn prefix_cache_stats(&self) -> Value {
        let names = [
            "requests",
            "queries",
            "hits",
            "preempted_requests",
            "preempted_queries",
            "preempted_hits",
        ];
        let counts = names.into_iter().zip(self.prefix_cache.map(Value::from));
        let first = ("reset", self.is_reset.into());
        map([first].into_iter().chain(counts).chain([("hits_by_source", map([]))]))
    }

    fn spec_decoding_stats(&self) -> Value {
        let Some((counts, positions)) = &self.spec else { return Value::Nil };
        map([
            ("num_spec_tokens", positions.len().into()),
            ("num_drafts", counts[0].into()),
            ("num_draft_tokens", counts[1].into()),
            ("num_accepted_tokens", counts[2].into()),
            ("num_accepted_tokens_per_pos", array(positions.iter().map(|it| it.0))),
            ("num_draft_tokens_per_pos", array(positions.iter().map(|it| it.1))),
        ])
    }

    fn expected(&self) -> Value {
        let stages = self.fetch_stages.iter().map(|stage| (stage.as_str().into(), 0.into()));
        map([
            ("num_running_reqs", self.queues[0].into()),
            ("num_waiting_reqs", self.queues[1].into()),
            ("num_skipped_waiting_reqs", self.queues[2].into()),
            ("num_kv_fetch_reqs_by_stage", Value::Map(stages.collect())),
            ("step_counter", 0.into()),
            ("current_wave", 0.into()),
            ("kv_cache_usage", self.usage.map_or(0.into(), Value::from)),
            ("iteration_details", Value::Nil),
            ("prefix_cache_stats", self.prefix_cache_stats()),
            ("connector_prefix_cache_stats", Value::Nil),
            ("kv_cache_eviction_events", Value::Array(vec![])),
            ("spec_decoding_stats", self.spec_decoding_stats()),
            ("kv_connector_stats", Value::Nil),
            ("ec_connector_stats", Value::Nil),
            ("waiting_lora_adapters", map([])),
            ("running_lora_adapters", map([])),
            ("cudagraph_stats", Value::Nil),
            ("perf_stats", Value::Nil),
        ])
    }
}

impl AnyEnvelope {
    fn bytes<'a>(&self, message: &'a mut Message) -> &'a [u8] {
        let stats = self.stats.as_ref().map(AnyStats::stats);
        message.bytes(&Envelope {
            engine_index: self.engine_index,
            scheduler_stats: match (&stats, &self.stats) {
                (Some(stats), Some(any)) => {
                    Stats::Core { stats, kv_fetch_stages: &any.fetch_stages }
                }
                _ => Stats::None,
            },
            timestamp: self.timestamp,
            finished_requests: self.finished.as_deref(),
            weight_version: self.weight_version.as_deref(),
        })
    }

    fn expected(&self, outputs: &[Value]) -> Value {
        let ids = |ids: &Vec<String>| array(ids.iter().map(String::as_str));
        Value::Array(vec![
            self.engine_index.into(),
            Value::Array(outputs.to_vec()),
            self.stats.as_ref().map_or(Value::Nil, AnyStats::expected),
            self.timestamp.into(),
            Value::Nil,
            self.finished.as_ref().map_or(Value::Nil, ids),
            Value::Nil,
            Value::Nil,
            or_nil(self.weight_version.as_deref()),
        ])
    }
}

fn encoded(value: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    rmpv::encode::write_value(&mut bytes, value).unwrap();
    bytes
}

fn decoded(mut bytes: &[u8]) -> Value {
    let value = rmpv::decode::read_value(&mut bytes).expect("msgpack");
    assert!(bytes.is_empty(), "something follows the message: {bytes:x?}");
    value
}

/// Compared as bytes first, because no NaN equals another.
fn check_message(bytes: &[u8], expected: &Value) {
    if bytes != encoded(expected) {
        assert_eq!(&decoded(bytes), expected, "it says something else");
        panic!("not in its shortest form: {bytes:x?}");
    }
    assert_eq!(encoded(&decoded(bytes)), bytes, "it says it in another way");
}

/// Plays the steps.
pub fn check(Input(num_further_fields, steps): &Input) {
    let num_fields = NUM_KNOWN_FIELDS + usize::from(num_further_fields % 4);
    let mut message = Message::new(num_fields, 0);
    let mut outputs = Vec::new();
    for step in steps {
        match step {
            Step::Push(output) => {
                output.push(&mut message);
                outputs.push(output.expected(num_fields));
            }
            Step::PushEncoded(bytes) => {
                let Ok(output) = AnyOutput::arbitrary(&mut Unstructured::new(bytes)) else {
                    continue;
                };
                let output = output.expected(num_fields);
                message.push_encoded(&encoded(&output));
                outputs.push(output);
            }
            Step::Read(envelope) => {
                check_message(envelope.bytes(&mut message), &envelope.expected(&outputs));
            }
        }
    }
}
