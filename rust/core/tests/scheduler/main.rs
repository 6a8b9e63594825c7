//! The core against naive models, and through random lives of requests.

mod block_pool;
mod bookkeeping;
#[path = "../common/mod.rs"]
mod common;
mod prefix_cache;
mod rare;
