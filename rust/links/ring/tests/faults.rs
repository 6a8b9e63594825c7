//! Two processes, of which one is killed or stopped at each named point of the protocol and at
//! random moments: what the other one sees.
#![cfg(not(feature = "loom"))]

mod common;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use common::{
    Chance, Deadline, Half, Holdings, Kid, LAST_RESORT, NEVER_STUCK, PATIENCE, ROLE,
    client_options, connect, engine_options, fresh_name, listen, note, number, number_or, until,
    until_within, variable,
};
use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, getpid, kill_process};
use sparksched_ring::client::ClientRings;
use sparksched_ring::engine::{EngineEvent, EngineOptions, EngineRings};
use sparksched_ring::link::{End, Event};
use sparksched_ring::points;

const RING_BYTES: usize = 4096;
/// Several times the ring, so that messages pass in pieces.
const MAX_BYTES: u64 = 3 * RING_BYTES as u64;
/// More than are ever sent before a kill.
const ENDLESS: u64 = 1_000_000;
const STUCK_AFTER: Duration = Duration::from_millis(300);
/// What a child may take for its part, stops included.
const LIFE: Duration = Duration::from_secs(240);

/// Points that a client passes.
const CLIENT_POINTS: &[&str] = &[
    "hello-sent",
    "confirmed",
    "attached",
    "written",
    "published",
    "ringing",
    "rung",
    "half-written",
    "read",
    "released",
    "asleep",
    "waiting-for-space",
    "closing",
];
/// Points that an engine passes.
const ENGINE_POINTS: &[&str] = &[
    "welcome-sent",
    "attached",
    "written",
    "published",
    "ringing",
    "rung",
    "half-written",
    "read",
    "released",
    "asleep",
    "waiting-for-space",
    "closing",
];
/// Points that a process passes once for each link.
const ONCE: &[&str] = &["hello-sent", "welcome-sent", "confirmed", "attached", "closing"];

const IN_HANDSHAKE: &[&str] = &["hello-sent", "welcome-sent", "confirmed", "attached"];

/// Descriptors and children are counted for the whole process, so its tests take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

// ------------------------------------------------------------------------------------
// The child's part
// ------------------------------------------------------------------------------------

/// At which occurrence of which point the child sends itself which signal.
struct Fate {
    point: String,
    occurrence: u64,
    signal: Signal,
}

static FATE: OnceLock<Fate> = OnceLock::new();
static OCCURRENCES: AtomicU64 = AtomicU64::new(0);
/// Whether occurrences count yet.
static IS_ARMED: AtomicBool = AtomicBool::new(true);

fn meet_fate(point: &str) {
    let fate = FATE.get().expect("set before the listener");
    let is_it = point == fate.point && IS_ARMED.load(Relaxed);
    if is_it && OCCURRENCES.fetch_add(1, Relaxed) + 1 == fate.occurrence {
        kill_process(getpid(), fate.signal).unwrap();
        // Another thread may have to take the signal, and this one would run on until it does.
        while is_pending(fate.signal) {
            std::thread::yield_now();
        }
    }
}

/// Whether no thread of this process has taken a signal yet. The one that does stops all of them
/// before anybody can see that it is taken.
fn is_pending(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
    let pending = u64::from_str_radix(pending.trim(), 16).unwrap();
    pending & 1 << (signal.as_raw() - 1) != 0
}

/// What a child is told besides its role.
struct Task {
    name: String,
    /// This many messages are sent each way; then it says goodbye.
    total: u64,
    stuck_after: Duration,
}

#[test]
fn child_main() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let _deadline = Deadline::after(LIFE + PATIENCE, "a child");
    let signal = match &variable("SIGNAL")[..] {
        "kill" => Signal::KILL,
        "stop" => Signal::STOP,
        other => panic!("signal {other}"),
    };
    let fate = Fate { point: variable("POINT"), occurrence: number("OCCURRENCE"), signal };
    assert!(FATE.set(fate).is_ok());
    points::LISTENER.set(meet_fate).unwrap();
    let task = Task {
        name: variable("NAME"),
        total: number("TOTAL"),
        stuck_after: Duration::from_millis(number("STUCK_AFTER_MS")),
    };
    match &role[..] {
        "client" => be_client(&task),
        "engine" => be_engine(&task),
        "parent" => be_parent_of_a_sleeper(&task),
        other => panic!("role {other}"),
    }
}

/// Client 0. Its first note is how many messages are wholly in the ring.
fn be_client(task: &Task) {
    let mut options = client_options(0);
    options.stuck_after = task.stuck_after;
    let client = connect(&task.name, &options, || false).unwrap();
    let mut half = Half::of_client(0, MAX_BYTES);
    until_within(LIFE, "a client's life", || {
        half.send(client.link(), task.total);
        note(0, client.link().sent_before());
        for event in client.receive(16) {
            half.take(event);
        }
        note(0, client.link().sent_before());
        client.wait(Some(Duration::from_millis(1)));
        half.end.is_some() || (half.num_sent >= task.total && half.num_received >= task.total)
    });
    client.close(PATIENCE);
    note(1, 1);
}

/// The engine of clients 0 and 1; its notes 0 and 1 are how many messages are wholly in their rings.
/// Unless its fate is to be met in the handshake, both have come before.
fn be_engine(task: &Task) {
    IS_ARMED.store(IN_HANDSHAKE.contains(&&variable("POINT")[..]), Relaxed);
    let mut options = engine_options(2, RING_BYTES);
    options.stuck_after = task.stuck_after;
    let engine = listen(&task.name, options);
    let mut halves = [Half::of_engine(0, MAX_BYTES), Half::of_engine(1, MAX_BYTES)];
    until_within(LIFE, "an engine's life", || {
        for event in engine.receive(Some(Duration::from_millis(1))) {
            if let EngineEvent::Link { client, event } = event {
                halves[client as usize].take(event);
            }
        }
        for (client, half) in (0..).zip(&mut halves) {
            if let Some(link) = engine.link(client) {
                half.send(link, task.total);
                note(client.into(), link.sent_before());
            }
        }
        if engine.link(0).is_some() && engine.link(1).is_some() {
            IS_ARMED.store(true, Relaxed);
        }
        halves.iter().all(|half| {
            half.end.is_some() || (half.num_sent >= task.total && half.num_received >= task.total)
        })
    });
    engine.close(PATIENCE);
    note(2, 1);
}

/// A client whose own child inherits all its descriptors and outlives it. Its first note is that
/// child.
#[expect(clippy::zombie_processes, reason = "it is to outlive this process")]
fn be_parent_of_a_sleeper(task: &Task) {
    let client = connect(&task.name, &client_options(0), || false).unwrap();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let Ok(raw) = entry.unwrap().file_name().to_str().unwrap().parse() else { continue };
        if raw > 2 {
            // SAFETY: it was open a moment ago; if it is the listing's own and closed by now, the
            // call below fails, and nothing else is opened in this process meanwhile.
            let fd = unsafe { BorrowedFd::borrow_raw(raw) };
            let _ = rustix::io::fcntl_setfd(fd, FdFlags::empty());
        }
    }
    let sleeper = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    note(0, sleeper.id().into());
    if task.total == 0 {
        until_within(LIFE, "it dies of its fate", || {
            // Not all of them find the engine asleep, and ring.
            let _ = client.link().send(0, &[b"last words"], false);
            std::thread::sleep(Duration::from_millis(1));
            false
        });
    }
    client.close(PATIENCE);
}

// ------------------------------------------------------------------------------------
// The survivor's part
// ------------------------------------------------------------------------------------

/// What is done to a child, and when.
#[derive(Debug)]
struct Plan {
    role: &'static str,
    point: &'static str,
    occurrence: u64,
    signal: &'static str,
}

impl Plan {
    fn spawn(&self, name: &str, total: u64, stuck_after: Duration) -> Kid {
        let variables = [
            ("NAME", name.to_owned()),
            ("POINT", self.point.to_owned()),
            ("OCCURRENCE", self.occurrence.to_string()),
            ("SIGNAL", self.signal.to_owned()),
            ("TOTAL", total.to_string()),
            ("STUCK_AFTER_MS", stuck_after.as_millis().to_string()),
        ];
        Kid::spawn(&format!("{self:?}"), self.role, &variables)
    }

    /// How many messages are sent before a goodbye; only who is to die in it comes that far.
    fn total(&self) -> u64 {
        if self.point == "closing" { 5 * self.occurrence } else { ENDLESS }
    }

    /// How many messages the survivor sends to who is stopped, before it has seen that it runs again:
    /// without the last one there is no goodbye. Who is to stop in its goodbye gets all.
    fn total_before_recovery(&self) -> u64 {
        if self.point == "closing" { STOP_TOTAL } else { STOP_TOTAL - 1 }
    }
}

/// An engine in this process, with a bystander as client 1.
struct Survivor {
    engine: EngineRings,
    bystander: ClientRings,
    half: Half,
    num_bystanders_messages: u64,
    refusals: Vec<String>,
}

impl Survivor {
    fn new(stuck_after: Duration) -> Self {
        let mut options = engine_options(2, RING_BYTES);
        options.stuck_after = stuck_after;
        let engine = listen(&fresh_name("faults"), options);
        let bystander = connect(engine.name(), &client_options(1), || false).unwrap();
        let half = Half::of_engine(0, MAX_BYTES);
        Self { engine, bystander, half, num_bystanders_messages: 0, refusals: Vec::new() }
    }

    /// Receives what there is, and sends something to client 0.
    fn pump(&mut self, total: u64) {
        self.pump_for(Duration::from_millis(2), total);
    }

    fn pump_for(&mut self, timeout: Duration, total: u64) {
        for event in self.engine.receive(Some(timeout)) {
            match event {
                EngineEvent::Link { client: 0, event } => self.half.take(event),
                EngineEvent::Link { event: Event::Message(_), .. } => {
                    self.num_bystanders_messages += 1;
                }
                // A busy machine; the bystander lives in this process.
                EngineEvent::Link { event: Event::Stuck(_) | Event::Recovered, .. }
                | EngineEvent::Attached { .. } => {}
                EngineEvent::Link { event, .. } => panic!("{event:?} from the bystander"),
                EngineEvent::Refused(reason) => self.refusals.push(reason),
            }
        }
        if let Some(link) = self.engine.link(0) {
            self.half.send(link, total);
        }
    }

    /// Waits for the end of client 0, which is dead. If it died before it had a link, its place is free
    /// for a client that lives longer, which comes back. It may get its link after its death: only
    /// once another has its place it can't any more.
    fn wait_for_end_or_successor(&mut self, plan: &Plan) -> Option<ClientRings> {
        if self.half.end.is_none() {
            let has_link = || self.engine.link(0).is_some();
            let successor = connect(self.engine.name(), &client_options(0), has_link);
            if successor.is_some() {
                return successor;
            }
        }
        until(&format!("{plan:?}: the engine sees the end"), || {
            self.pump(plan.total());
            self.half.end.is_some()
        });
        None
    }

    /// The bystander's messages arrive, and it gets answers.
    fn serve_bystander(&mut self, plan: &Plan) {
        let before = self.num_bystanders_messages;
        self.bystander.link().send(0, &[b"still there?"], false).unwrap();
        until(&format!("{plan:?}: the bystander is served"), || {
            self.pump(0);
            self.num_bystanders_messages > before
        });
        self.engine.link(1).unwrap().send(0, &[b"yes"], false).unwrap();
        until(&format!("{plan:?}: the bystander is answered"), || {
            self.bystander.wait(Some(Duration::from_millis(100)));
            self.bystander.receive(16).iter().any(|event| matches!(event, Event::Message(_)))
        });
    }
}

/// Kills a client; checks what the engine sees.
fn kill_client(plan: &Plan, moment: Option<Duration>) {
    let mut survivor = Survivor::new(NEVER_STUCK);
    let mut kid = plan.spawn(survivor.engine.name(), plan.total(), NEVER_STUCK);
    if let Some(moment) = moment {
        let deadline = Instant::now() + moment;
        while Instant::now() < deadline {
            survivor.pump(ENDLESS);
        }
        kid.signal(Signal::KILL);
    }
    until(&format!("{plan:?}: the engine learns of the death"), || {
        // Nothing but the death itself may be needed to wake the engine; but who dies before it
        // connects dies unseen, and who is to say goodbye first hears all that there is to say.
        let is_seen = moment.is_none() || survivor.engine.link(0).is_some();
        let is_seen = is_seen && survivor.refusals.is_empty() && plan.point != "closing";
        let timeout = if is_seen { PATIENCE } else { Duration::from_millis(2) };
        survivor.pump_for(timeout, plan.total());
        survivor.half.end.is_some() || (survivor.engine.link(0).is_none() && kid.has_ended())
    });
    kid.expect_kill();
    let successor = survivor.wait_for_end_or_successor(plan);
    check_end(plan, &survivor.half, kid.note(0), successor.is_none());
    survivor.serve_bystander(plan);
    drop(successor);
    survivor.bystander.close(Duration::ZERO);
    survivor.engine.close(Duration::ZERO);
}

fn check_end(plan: &Plan, half: &Half, num_published: u64, has_link: bool) {
    if has_link {
        // A goodbye that was cut off before its system call is still one.
        let is_death = matches!(half.end, Some(End::Died));
        let is_goodbye = matches!(half.end, Some(End::Closed)) && plan.point == "closing";
        assert!(is_death || is_goodbye, "{plan:?}: the end is {:?}", half.end);
    } else {
        assert_eq!(half.num_received, 0, "{plan:?}");
    }
    assert!(
        half.num_received >= num_published,
        "{plan:?}: {num_published} messages were published, {} arrived",
        half.num_received
    );
}

/// Two clients in this process, of an engine that is to be killed or stopped.
struct Clients {
    clients: Vec<(ClientRings, Half)>,
}

impl Clients {
    fn connect(name: &str, stuck_after: Duration, kid: &mut Kid) -> Self {
        let mut clients = Vec::new();
        for index in 0..2 {
            let mut options = client_options(index);
            options.stuck_after = stuck_after;
            if let Some(client) = connect(name, &options, || kid.has_ended()) {
                clients.push((client, Half::of_client(index, MAX_BYTES)));
            }
        }
        Self { clients }
    }

    fn pump(&mut self, total: u64) {
        self.pump_for(Duration::from_millis(1), total);
    }

    fn pump_for(&mut self, timeout: Duration, total: u64) {
        for (client, half) in &mut self.clients {
            half.send(client.link(), total);
            if half.end.is_none() {
                client.wait(Some(timeout));
            }
            for event in client.receive(16) {
                half.take(event);
            }
        }
    }

    fn all(&self, is: impl Fn(&Half) -> bool) -> bool {
        self.clients.iter().all(|(_, half)| is(half))
    }
}

/// Kills an engine; checks what its clients see.
fn kill_engine(plan: &Plan, moment: Option<Duration>) {
    let name = fresh_name("faults");
    let mut kid = plan.spawn(&name, plan.total(), NEVER_STUCK);
    let mut clients = Clients::connect(&name, NEVER_STUCK, &mut kid);
    // Who dies in the handshake with the first client hasn't heard the second.
    let is_in_handshake = IN_HANDSHAKE.contains(&plan.point);
    assert!(clients.clients.len() == 2 || is_in_handshake, "{plan:?}: a client can't connect");
    if let Some(moment) = moment {
        let deadline = Instant::now() + moment;
        while Instant::now() < deadline {
            clients.pump(ENDLESS);
        }
        kid.signal(Signal::KILL);
    }
    until(&format!("{plan:?}: the clients learn of the death"), || {
        // Nothing but the death itself may be needed to wake them; but an engine that is to say
        // goodbye first hears all that both have to say.
        let is_goodbye = plan.point == "closing";
        let timeout = if is_goodbye { Duration::from_millis(1) } else { PATIENCE };
        clients.pump_for(timeout, plan.total());
        clients.all(|half| half.end.is_some()) && (!clients.clients.is_empty() || kid.has_ended())
    });
    kid.expect_kill();
    for (index, (client, half)) in (0..).zip(&clients.clients) {
        check_end(plan, half, kid.note(index), true);
        assert!(client.receive(16).is_empty(), "{plan:?}: something after the end");
        client.close(Duration::ZERO);
    }
}

/// At which occurrence of a point a process dies in a round.
fn occurrence(point: &str, round: u64, chance: &mut Chance) -> u64 {
    if ONCE.contains(&point) { 1 } else { 1 + chance.below(6 << round.min(3)) }
}

#[test]
fn kills_at_every_point_are_survived() {
    let _turn = turn();
    let rounds = rounds(15);
    let holdings = Holdings::now();
    let mut num_kills = BTreeMap::new();
    let mut chance = Chance::new(1);
    for (role, its_points) in [("client", CLIENT_POINTS), ("engine", ENGINE_POINTS)] {
        for &point in its_points {
            for round in 0..rounds {
                let plan = Plan {
                    role,
                    point,
                    occurrence: occurrence(point, round, &mut chance),
                    signal: "kill",
                };
                let _deadline = Deadline::after(LAST_RESORT, &format!("{plan:?}"));
                if role == "client" {
                    kill_client(&plan, None);
                } else {
                    kill_engine(&plan, None);
                }
                *num_kills.entry((role, point)).or_insert(0) += 1;
            }
        }
    }
    for point in points::ALL {
        let is_met = num_kills.keys().any(|(_, met)| met == point);
        assert!(is_met, "nobody was killed at {point}: add it to the points of a side");
    }
    println!("{} kills at points", num_kills.values().sum::<u32>());
    holdings.assert_unchanged("after kills at points");
}

/// Thorough runs set more rounds.
fn rounds(default: u64) -> u64 {
    number_or("SPARKSCHED_FAULT_ROUNDS", default)
}

#[test]
fn kills_at_random_moments_are_survived() {
    let _turn = turn();
    let holdings = Holdings::now();
    let mut chance = Chance::new(2);
    let num_kills = 20 * rounds(15);
    for i in 0..num_kills {
        let moment = Duration::from_micros(chance.below(30_000));
        let role = if i % 2 == 0 { "client" } else { "engine" };
        let plan = Plan { role, point: "none", occurrence: i, signal: "kill" };
        let _deadline = Deadline::after(LAST_RESORT, &format!("{plan:?} {moment:?}"));
        if role == "client" {
            kill_client(&plan, Some(moment));
        } else {
            kill_engine(&plan, Some(moment));
        }
    }
    println!("{num_kills} kills at random moments");
    holdings.assert_unchanged("after kills at random moments");
}

const STOP_TOTAL: u64 = 60;

/// Stops a client, and lets it run again once it is noticed, or later.
fn stop_client(plan: &Plan, lasts: Duration) {
    let mut survivor = Survivor::new(STUCK_AFTER);
    let mut kid = plan.spawn(survivor.engine.name(), STOP_TOTAL, STUCK_AFTER);
    let total_before = plan.total_before_recovery();
    kid.wait_for_stop(|| survivor.pump(total_before));
    let end_of_stop = Instant::now() + lasts;
    // Without a link there is nobody to be called stuck yet.
    if plan.point != "hello-sent" {
        until(&format!("{plan:?}: the engine notices"), || {
            // Nothing but the notice may be needed to wake the engine.
            let timeout = if survivor.half.is_stuck() { Duration::ZERO } else { PATIENCE };
            survivor.pump_for(timeout, total_before);
            survivor.half.is_stuck()
        });
        check_notice(plan, &survivor.half);
    }
    survivor.serve_bystander(plan);
    while Instant::now() < end_of_stop {
        survivor.pump_for(Duration::from_millis(100), total_before);
        survivor.serve_bystander(plan);
    }
    kid.signal(Signal::CONT);
    // Who closes as it wakes up may be gone before it is seen to run.
    if plan.point != "closing" {
        until(&format!("{plan:?}: the engine sees that the client runs again"), || {
            survivor.pump(total_before);
            !survivor.half.is_stuck()
        });
    }
    until(&format!("{plan:?}: the client goes on and says goodbye"), || {
        survivor.pump(STOP_TOTAL);
        survivor.half.end.is_some()
    });
    kid.expect_success();
    check_goodbye(plan, &survivor.half);
    survivor.bystander.close(Duration::ZERO);
    survivor.engine.close(Duration::ZERO);
}

fn check_notice(plan: &Plan, half: &Half) {
    assert!(half.last_silence >= STUCK_AFTER, "{plan:?}: {:?}", half.last_silence);
}

fn check_goodbye(plan: &Plan, half: &Half) {
    assert_eq!(half.end, Some(End::Closed), "{plan:?}");
    assert_eq!(half.num_received, STOP_TOTAL, "{plan:?}");
}

/// Stops an engine while a client connects, and lets it run again: the client gets there.
fn stop_engine_in_welcome(plan: &Plan) {
    let name = fresh_name("faults");
    let mut kid = plan.spawn(&name, STOP_TOTAL, STUCK_AFTER);
    let options = [0, 1].map(client_options);
    let clients = std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(&name, &options[0], || false).unwrap());
        kid.wait_for_stop(|| std::thread::sleep(Duration::from_millis(1)));
        kid.signal(Signal::CONT);
        let second = connect(&name, &options[1], || false).unwrap();
        [first.join().unwrap(), second]
    });
    let halves = [0, 1].map(|index| Half::of_client(index, MAX_BYTES));
    let mut clients = Clients { clients: clients.into_iter().zip(halves).collect() };
    until(&format!("{plan:?}: the engine goes on and says goodbye"), || {
        clients.pump(STOP_TOTAL);
        clients.all(|half| half.end.is_some())
    });
    kid.expect_success();
    for (client, half) in &clients.clients {
        check_goodbye(plan, half);
        client.close(Duration::ZERO);
    }
}

/// Stops an engine, and lets it run again once it is noticed, or later.
fn stop_engine(plan: &Plan, lasts: Duration) {
    let name = fresh_name("faults");
    let mut kid = plan.spawn(&name, STOP_TOTAL, STUCK_AFTER);
    let pump_until = |clients: &mut Clients, what: &str, total, is: &dyn Fn(&Half) -> bool| {
        until(&format!("{plan:?}: {what}"), || {
            clients.pump(total);
            clients.all(is)
        });
    };
    let mut options = client_options(0);
    options.stuck_after = STUCK_AFTER;
    let first = connect(&name, &options, || false).unwrap();
    let mut clients = Clients { clients: vec![(first, Half::of_client(0, MAX_BYTES))] };
    let is_in_handshake = IN_HANDSHAKE.contains(&plan.point);
    if !is_in_handshake {
        options.client_index = 1;
        let second = connect(&name, &options, || false).unwrap();
        clients.clients.push((second, Half::of_client(1, MAX_BYTES)));
    }
    let total_before = plan.total_before_recovery();
    kid.wait_for_stop(|| clients.pump(total_before));
    let end_of_stop = Instant::now() + lasts;
    pump_until(&mut clients, "the clients notice", total_before, &Half::is_stuck);
    clients.clients.iter().for_each(|(_, half)| check_notice(plan, half));
    while Instant::now() < end_of_stop {
        clients.pump_for(Duration::from_millis(100), total_before);
    }
    kid.signal(Signal::CONT);
    if plan.point != "closing" {
        let what = "the clients see that the engine runs again";
        pump_until(&mut clients, what, total_before, &|half| !half.is_stuck());
    }
    if is_in_handshake {
        options.client_index = 1;
        let second = connect(&name, &options, || false).unwrap();
        clients.clients.push((second, Half::of_client(1, MAX_BYTES)));
    }
    let what = "the engine goes on and says goodbye";
    pump_until(&mut clients, what, STOP_TOTAL, &|half| half.end.is_some());
    kid.expect_success();
    for (client, half) in &clients.clients {
        check_goodbye(plan, half);
        client.close(Duration::ZERO);
    }
}

/// At which occurrence of a point a process stops, if it passes the point often enough.
///
/// Of `STOP_TOTAL` messages, perhaps only the first is half-written: if the reader falls behind,
/// the others wait in the sender's queue.
fn occurrence_of_stop(point: &str, usual: u64) -> u64 {
    if ONCE.contains(&point) || point == "half-written" { 1 } else { usual }
}

#[test]
fn stops_at_every_point_are_noticed_and_survived() {
    let _turn = turn();
    let holdings = Holdings::now();
    for (role, its_points) in [("client", CLIENT_POINTS), ("engine", ENGINE_POINTS)] {
        for &point in its_points {
            let plan =
                Plan { role, point, occurrence: occurrence_of_stop(point, 3), signal: "stop" };
            let _deadline = Deadline::after(LAST_RESORT, &format!("{plan:?}"));
            match (role, point) {
                ("client", _) => stop_client(&plan, Duration::ZERO),
                (_, "welcome-sent") => stop_engine_in_welcome(&plan),
                _ => stop_engine(&plan, Duration::ZERO),
            }
        }
    }
    holdings.assert_unchanged("after stops");
}

/// Long stops: ten, unless `SPARKSCHED_LONG_STOPS` wants more or less.
fn num_long_stops() -> u64 {
    number_or("SPARKSCHED_LONG_STOPS", 10)
}

/// They last 1 to 4 s, or up to `SPARKSCHED_LONGEST_STOP_S`.
fn longest_stop_s() -> u64 {
    number_or("SPARKSCHED_LONGEST_STOP_S", 4)
}

fn stop_for_long(number: u64) {
    let mut chance = Chance::new(number);
    let role = ["client", "engine"][number as usize % 2];
    let points = ["published", "ringing", "half-written", "read", "asleep"];
    let point = points[chance.below(points.len() as u64) as usize];
    let occurrence = occurrence_of_stop(point, 1 + chance.below(5));
    let plan = Plan { role, point, occurrence, signal: "stop" };
    let lasts = Duration::from_millis(1000 + chance.below((longest_stop_s() - 1) * 1000 + 1));
    let _deadline = Deadline::after(LAST_RESORT, &format!("{plan:?} for {lasts:?}"));
    match role {
        "client" => stop_client(&plan, lasts),
        _ => stop_engine(&plan, lasts),
    }
}

/// Several at a time: it is waiting that takes long.
#[test]
fn long_stops_are_noticed_and_survived() {
    const AT_A_TIME: u64 = 10;
    let _turn = turn();
    let holdings = Holdings::now();
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= num_long_stops() {
                        break;
                    }
                    stop_for_long(number);
                }
            });
        }
    });
    println!("{} stops of 1 to {} s", num_long_stops(), longest_stop_s());
    holdings.assert_unchanged("after long stops");
}

#[test]
fn a_child_with_copies_of_the_descriptors_hides_no_end() {
    let _turn = turn();
    let holdings = Holdings::now();
    for (point, total, expected) in [("rung", 0, End::Died), ("none", 1, End::Closed)] {
        let _deadline = Deadline::after(LAST_RESORT, "a client with a child");
        let engine = listen(&fresh_name("inherited"), engine_options(1, RING_BYTES));
        let plan = Plan { role: "parent", point, occurrence: 1, signal: "kill" };
        let mut kid = plan.spawn(engine.name(), total, NEVER_STUCK);
        let mut end = None;
        until(&format!("{plan:?}: its end is seen"), || {
            for event in engine.receive(Some(Duration::from_millis(10))) {
                if let EngineEvent::Link { event: Event::End(its_end), .. } = event {
                    end = Some(its_end);
                }
            }
            end.is_some()
        });
        assert_eq!(end, Some(expected));
        kid.wait();
        let sleeper = i32::try_from(kid.note(0)).ok().and_then(Pid::from_raw).unwrap();
        // It was there all the time.
        kill_process(sleeper, Signal::KILL).unwrap();
        engine.close(Duration::ZERO);
    }
    holdings.assert_unchanged("after clients with children");
}

// ------------------------------------------------------------------------------------
// A watcher thread that panics
// ------------------------------------------------------------------------------------

/// A watcher makes a round in a fraction of this.
const WATCHED_EVERY: Duration = Duration::from_secs(1);

static PANICS: AtomicBool = AtomicBool::new(false);

/// Of all watchers of this process one at a time panics.
fn panic_when_armed(point: &str) {
    assert!(point != points::WATCHING || !PANICS.swap(false, Relaxed), "a test wants this panic");
}

fn its_end(client: &ClientRings) -> Option<End> {
    client.receive(64).into_iter().find_map(|event| match event {
        Event::End(end) => Some(end),
        _ => None,
    })
}

/// Nobody would learn of a death any more, so its links end.
#[test]
fn links_end_with_the_thread_that_watches_them() {
    let _deadline = Deadline::after(LAST_RESORT, "broken watchers");
    let _turn = turn();
    points::LISTENER.set(panic_when_armed).unwrap();
    let holdings = Holdings::now();
    for _ in 0..4 {
        let name = fresh_name("broken-watcher");
        let options = EngineOptions { stuck_after: WATCHED_EVERY, ..engine_options(2, RING_BYTES) };
        let engine = listen(&name, options);
        let client = connect(&name, &client_options(0), || false).unwrap();
        // Whichever of the two it is that panics: both sides see the end, and neither a death.
        PANICS.store(true, Relaxed);
        let mut of_client = None;
        until("the client sees an end", || {
            of_client = of_client.or_else(|| its_end(&client));
            of_client.is_some()
        });
        let mut of_engine = None;
        until("the engine sees an end", || {
            for event in engine.receive(Some(Duration::from_millis(1))) {
                if let EngineEvent::Link { event: Event::End(end), .. } = event {
                    of_engine = Some(end);
                }
            }
            of_engine.is_some()
        });
        let ends = (of_client.unwrap(), of_engine.unwrap());
        assert!(
            matches!(ends, (End::HungUp, End::Closed) | (End::Closed, End::HungUp)),
            "{ends:?}"
        );
        if of_engine == Some(End::HungUp) {
            // Nobody could be watched: nobody is let in.
            assert!(ClientRings::connect(&name, client_options(1)).is_err());
        }
    }
    holdings.assert_unchanged("after broken watchers");
}
