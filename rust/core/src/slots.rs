//! The places of requests.

use std::ops::{Index, IndexMut};

use crate::ids::RequestIndex;
use crate::request::Request;

/// All requests, by their places. A place is given to another request once its own has left.
///
/// It is a field beside queues and blocks, so that a request and one of these can be changed at the
/// same time. A place that is known to hold a request is indexed; one that may be empty is asked
/// for with [`Self::get`].
#[derive(Clone, Debug, Default)]
pub struct Slots {
    requests: Vec<Option<Request>>,
    free: Vec<RequestIndex>,
}

impl Slots {
    pub fn next_place(&self) -> RequestIndex {
        self.free.last().copied().unwrap_or(RequestIndex(self.requests.len() as u32))
    }

    /// Puts a request at [`Self::next_place`].
    pub(crate) fn insert(&mut self, request: Request) {
        match self.free.pop() {
            Some(index) => self.requests[index.index()] = Some(request),
            None => self.requests.push(Some(request)),
        }
    }

    /// Forgets the request at a place, which is given to another from now on. It has left the queues
    /// and has no blocks.
    pub(crate) fn vacate(&mut self, index: RequestIndex) {
        self.requests[index.index()] = None;
        self.free.push(index);
    }

    pub fn get(&self, index: RequestIndex) -> Option<&Request> {
        self.requests.get(index.index())?.as_ref()
    }

    /// The request at a place, to be changed, if there is one.
    pub(crate) fn get_mut(&mut self, index: RequestIndex) -> Option<&mut Request> {
        self.requests.get_mut(index.index())?.as_mut()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().flatten()
    }
}

impl Index<RequestIndex> for Slots {
    type Output = Request;

    fn index(&self, index: RequestIndex) -> &Request {
        self.requests[index.index()].as_ref().expect("the place holds a request")
    }
}

impl IndexMut<RequestIndex> for Slots {
    fn index_mut(&mut self, index: RequestIndex) -> &mut Request {
        self.requests[index.index()].as_mut().expect("the place holds a request")
    }
}
