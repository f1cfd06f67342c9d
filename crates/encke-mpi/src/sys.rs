//! The calls of MPI that are used, with their return codes looked at.
//!
//! The bindings' own safe functions drop return codes, which is right where errors end the program
//! and wrong where a dead neighbour is an error like any other; so these are calls of the C
//! functions. What makes them sound is said here once: MPI is started with
//! `MPI_THREAD_SERIALIZED` at least, and a [`Communicator`] is used by one thread at a time, because an
//! exchange borrows its wire exclusively and lends it to one thread.

use std::ffi::c_int;

use mpi::ffi;

use crate::error::MpiError;

// SAFETY: as POSIX says; it ends the process and touches nothing of ours.
unsafe extern "C" {
    safe fn _exit(code: c_int) -> !;
}

// SAFETY: the declarations say what `shim.c` defines, which is compiled with the same `mpi.h`.
unsafe extern "C" {
    safe fn encke_mpi_class(code: c_int) -> c_int;
    safe fn encke_mpi_ulfm() -> c_int;
    fn encke_mpi_revoke(comm: ffi::MPI_Comm) -> c_int;
    fn encke_mpi_shrink(comm: ffi::MPI_Comm, left: *mut ffi::MPI_Comm) -> c_int;
    fn encke_mpi_iagree(
        comm: ffi::MPI_Comm,
        flag: *mut c_int,
        request: *mut ffi::MPI_Request,
    ) -> c_int;
    fn encke_mpi_failed(
        comm: ffi::MPI_Comm,
        ranks: *mut c_int,
        most: c_int,
        count: *mut c_int,
    ) -> c_int;
    fn encke_mpi_members(
        part: ffi::MPI_Comm,
        of: ffi::MPI_Comm,
        ranks: *mut c_int,
        most: c_int,
        count: *mut c_int,
    ) -> c_int;
}

/// Kinds of failure that are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// A process ended.
    Dead,
    /// Somebody revoked the communicator.
    Revoked,
    /// A message was longer than the buffer posted for it.
    TooLong,
    /// Anything else.
    Other,
}

/// A return code that is not success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFailure {
    pub class: ErrorClass,
    pub words: String,
}

impl CallFailure {
    /// As an error of a call apart from an exchange.
    pub fn during(self, what: &'static str) -> MpiError {
        let words = self.words;
        MpiError::Call { what, words }
    }
}

fn check(code: c_int) -> Result<(), CallFailure> {
    if code == 0 {
        return Ok(());
    }
    let class = match encke_mpi_class(code) {
        1 => ErrorClass::Dead,
        2 => ErrorClass::Revoked,
        3 => ErrorClass::TooLong,
        _ => ErrorClass::Other,
    };
    let mut text = [0u8; 1024];
    let mut length = 0;
    // SAFETY: the longest text of any MPI is 512 bytes, and both pointers are to our own memory.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let words = String::from_utf8_lossy(&text[..length]).trim().to_string();
    Err(CallFailure { class, words })
}

/// Whether deaths are reported and can be survived in this launch.
pub fn ulfm() -> bool {
    encke_mpi_ulfm() != 0
}

/// Ends this process without asking any library to tidy up: one that hangs would hang again.
pub fn leave(code: u8) -> ! {
    _exit(c_int::from(code))
}

/// Lets MPI work, when there is no request to test: news of a death is heard in its calls.
pub fn let_work() {
    let mut there = 0;
    // SAFETY: the world exists once MPI has been started, and nobody wants the status. Whether a
    // message is there, or an error, does not matter.
    unsafe {
        let (anyone, world) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_COMM_WORLD);
        ffi::MPI_Iprobe(anyone, 0, world, &mut there, ffi::RSMPI_STATUS_IGNORE);
    }
}

/// What the library calls itself, in one line.
pub fn library() -> String {
    let mut text = [0u8; 8192];
    let mut length = 0;
    // SAFETY: every MPI's MPI_MAX_LIBRARY_VERSION_STRING is at most 8192.
    unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let text = String::from_utf8_lossy(&text[..length]);
    let first = text.lines().next().unwrap_or_default();
    let name = first.split(',').next().unwrap_or(first).trim();
    name.trim_end_matches('\0').to_string()
}

/// A communicator whose errors are returned.
#[derive(Debug, Clone, Copy)]
pub struct Communicator(ffi::MPI_Comm);

// SAFETY: a communicator is a handle that any thread may use; that only one does at a time is the
// module's condition above.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// All processes, with errors returned from now on.
    pub fn world() -> Result<Communicator, CallFailure> {
        // SAFETY: the world exists once MPI has been started, which every caller has seen to.
        let world = Communicator(unsafe { ffi::RSMPI_COMM_WORLD });
        world.return_errors()?;
        Ok(world)
    }

    fn return_errors(self) -> Result<(), CallFailure> {
        // SAFETY: a live communicator and a predefined handler.
        check(unsafe { ffi::MPI_Comm_set_errhandler(self.0, ffi::RSMPI_ERRORS_RETURN) })
    }

    /// Another one of the same processes.
    pub fn duplicate(self) -> Result<Communicator, CallFailure> {
        // SAFETY: only a value to be overwritten.
        let mut other = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: a live communicator, and a place for the new one.
        check(unsafe { ffi::MPI_Comm_dup(self.0, &mut other) })?;
        let other = Communicator(other);
        other.return_errors()?;
        Ok(other)
    }

    /// The number of this process.
    pub fn rank(self) -> Result<usize, CallFailure> {
        let mut rank = 0;
        // SAFETY: a live communicator, and a place for the number.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &mut rank) })?;
        Ok(usize::try_from(rank).unwrap_or(0))
    }

    /// How many there are.
    pub fn size(self) -> Result<usize, CallFailure> {
        let mut size = 0;
        // SAFETY: as above.
        check(unsafe { ffi::MPI_Comm_size(self.0, &mut size) })?;
        Ok(usize::try_from(size).unwrap_or(0))
    }

    /// Ends every operation on it, here and everywhere.
    pub fn revoke(self) -> Result<(), CallFailure> {
        // SAFETY: a live communicator.
        check(unsafe { encke_mpi_revoke(self.0) })
    }

    /// A communicator of those that are left.
    pub fn shrink(self) -> Result<Communicator, CallFailure> {
        // SAFETY: only a value to be overwritten.
        let mut left = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: a live communicator, and a place for the new one.
        check(unsafe { encke_mpi_shrink(self.0, &mut left) })?;
        let left = Communicator(left);
        left.return_errors()?;
        Ok(left)
    }

    /// Its processes that are known to have ended.
    pub fn failed(self) -> Result<Vec<usize>, CallFailure> {
        let most = self.size()?;
        let mut ranks = vec![0; most];
        let mut count = 0;
        // SAFETY: `ranks` has room for as many as there are.
        check(unsafe { encke_mpi_failed(self.0, ranks.as_mut_ptr(), most as c_int, &mut count) })?;
        Ok(numbers(ranks, count))
    }

    /// The numbers that the processes of `part` have here, in the order of `part`.
    pub fn members(self, part: Communicator) -> Result<Vec<usize>, CallFailure> {
        let most = part.size()?;
        let mut ranks = vec![0; most];
        let mut count = 0;
        let places = ranks.as_mut_ptr();
        // SAFETY: `ranks` has room for as many as there are.
        check(unsafe { encke_mpi_members(part.0, self.0, places, most as c_int, &mut count) })?;
        Ok(numbers(ranks, count))
    }

    /// Begins to send.
    ///
    /// # Safety
    /// The bytes must stay where they are, and unchanged, until the request has ended.
    pub unsafe fn send(self, bytes: &[u8], to: usize, tag: c_int) -> Result<MpiRequest, CallFailure> {
        let mut request = MpiRequest::none();
        let (start, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
        // SAFETY: the caller keeps the bytes; no piece is longer than a C int can say.
        check(unsafe {
            let byte = ffi::RSMPI_UINT8_T;
            ffi::MPI_Isend(start, count, byte, to as c_int, tag, self.0, &mut request.0)
        })?;
        Ok(request)
    }

    /// Begins to receive, from one process or from anyone.
    ///
    /// # Safety
    /// The `count` bytes from `start` must stay where they are, and untouched, until the request
    /// has ended.
    pub unsafe fn receive(
        self,
        start: *mut u8,
        count: usize,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<MpiRequest, CallFailure> {
        let mut request = MpiRequest::none();
        let count = count as c_int;
        // SAFETY: the caller keeps the bytes to us; no piece is longer than a C int can say.
        check(unsafe {
            let from = from.map_or(ffi::RSMPI_ANY_SOURCE, |from| from as c_int);
            let byte = ffi::RSMPI_UINT8_T;
            let (start, request) = (start.cast(), &mut request.0);
            ffi::MPI_Irecv(start, count, byte, from, tag, self.0, request)
        })?;
        Ok(request)
    }
}

fn numbers(ranks: Vec<c_int>, count: c_int) -> Vec<usize> {
    let known = ranks.into_iter().take(usize::try_from(count).unwrap_or(0));
    known
        .filter_map(|rank| usize::try_from(rank).ok())
        .collect()
}

/// An agreement under way: it ends the same way for all that live, when all have come to it.
pub struct PendingAgreement {
    /// Everyone's yes or no, combined. Never freed: an agreement may outlive whoever waits for it.
    flag: *const c_int,
    request: MpiRequest,
}

impl PendingAgreement {
    /// Comes to an agreement, also on a communicator that was revoked.
    pub fn new(comm: Communicator, yes: bool) -> Result<PendingAgreement, CallFailure> {
        let flag: *mut c_int = Box::leak(Box::new(c_int::from(yes)));
        let mut request = MpiRequest::none();
        // SAFETY: a live communicator, a flag that is never freed, and a place for the request.
        check(unsafe { encke_mpi_iagree(comm.0, flag, &mut request.0) })?;
        Ok(PendingAgreement { flag, request })
    }

    /// What was agreed, once it is: no where anyone said no, or where somebody has died.
    pub fn test(&mut self) -> Result<Option<bool>, CallFailure> {
        match self.request.test() {
            Ok(false) => Ok(None),
            // SAFETY: the request has ended, so nobody writes to the flag any more.
            Ok(true) => Ok(Some(unsafe { *self.flag } != 0)),
            Err(fault) if fault.class == ErrorClass::Dead => Ok(Some(false)),
            Err(fault) => Err(fault),
        }
    }
}

/// Something that MPI has begun and not ended.
#[derive(Debug)]
pub struct MpiRequest(ffi::MPI_Request);

// SAFETY: a request is a handle that any thread may use, one at a time.
unsafe impl Send for MpiRequest {}

impl MpiRequest {
    /// One that has ended.
    pub fn none() -> MpiRequest {
        // SAFETY: a constant of the library.
        MpiRequest(unsafe { ffi::RSMPI_REQUEST_NULL })
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        // SAFETY: a constant of the library.
        self.0 == unsafe { ffi::RSMPI_REQUEST_NULL }
    }

    /// Lets MPI work, and says whether this has ended.
    pub fn test(&mut self) -> Result<bool, CallFailure> {
        if self.is_over() {
            return Ok(true);
        }
        let mut done = 0;
        // SAFETY: a request that is ours alone, and nobody wants its status.
        check(unsafe { ffi::MPI_Test(&mut self.0, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }

    /// Asks MPI to give it up. It has ended only when a test says so.
    pub fn cancel(&mut self) {
        if !self.is_over() {
            // SAFETY: a request that is ours alone. Where it cannot be given up, tests say so.
            let _ = check(unsafe { ffi::MPI_Cancel(&mut self.0) });
        }
    }
}
