//! The MPI calls that are used, with their return codes checked.
//!
//! The safe functions of the bindings ignore return codes, which is right where errors abort the
//! program and wrong where the death of a peer is an ordinary error; so these call the C functions.
//! Why that is sound: MPI is started with at least `MPI_THREAD_SERIALIZED`, and one thread at a
//! time uses a [`MpiCommunicator`], because an exchange borrows its transport exclusively and
//! passes it to one thread.

use std::borrow::Cow;
use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use mpi::{Threading, ffi};

use crate::error::MpiError;

// SAFETY: the declaration is that of POSIX; the call ends the process.
unsafe extern "C" {
    safe fn _exit(code: c_int) -> !;
}

// SAFETY: the declarations match `shim.c`, which is compiled with the same `mpi.h`.
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

/// The error classes that are distinguished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// A process has died.
    Dead,
    /// The communicator was revoked.
    Revoked,
    /// A message was longer than its receive buffer.
    TooLong,
    /// Anything else.
    Other,
}

/// A call that did not return `MPI_SUCCESS`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFailure {
    pub class: ErrorClass,
    pub message: String,
}

impl CallFailure {
    /// As the error of a call outside of an exchange.
    pub fn during(self, what: &'static str) -> MpiError {
        let message = self.message;
        MpiError::Call { what, message }
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
    // SAFETY: the longest message of any MPI is 512 bytes, and both pointers are to local
    // variables.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let message = text_of(&text, length).trim().to_string();
    Err(CallFailure { class, message })
}

/// The first `length` bytes as text.
fn text_of(bytes: &[u8], length: c_int) -> Cow<'_, str> {
    let length = usize::try_from(length).unwrap_or(0).min(bytes.len());
    String::from_utf8_lossy(&bytes[..length])
}

/// Makes `MPI_Init` return its errors, such as the death of another process during it, and delays
/// Open MPI's aborts by `delay`: it aborts, and ends all processes, when a death is reported while
/// a communicator is made. By default it prints a page and aborts at once; that remains so if this
/// process has other threads, because the environment must not change then.
pub fn soften_start_errors(delay: Duration) {
    if std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1) {
        let seconds = (delay.as_secs() + 1).to_string();
        // SAFETY: this is the only thread of the process.
        unsafe {
            std::env::set_var("OMPI_MCA_mpi_initial_errhandler", "mpi_errors_return");
            std::env::set_var("OMPI_MCA_opal_abort_delay", seconds);
        }
    }
}

/// Starts MPI; returns the thread support that it offers, or `None` if it was started before.
pub fn start() -> Result<Option<Threading>, CallFailure> {
    if mpi::environment::is_initialized() {
        return Ok(None);
    }
    let mut got = 0;
    // SAFETY: MPI allows absent arguments, and the place for the result is a local variable.
    check(unsafe {
        let wanted = ffi::RSMPI_THREAD_SERIALIZED;
        ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), wanted, &mut got)
    })?;
    Ok(Some(Threading::from(got)))
}

/// Ends MPI, together with all other processes.
pub fn finalize() {
    // SAFETY: MPI was started, and nothing calls it after this. The process ends in any case.
    unsafe { ffi::MPI_Finalize() };
}

/// Whether deaths of processes are reported and can be survived in this launch (ULFM).
pub fn ulfm() -> bool {
    encke_mpi_ulfm() != 0
}

/// Ends this process without the exit handlers of any library: one that hangs would hang again.
pub fn exit_at_once(code: u8) -> ! {
    _exit(c_int::from(code))
}

/// Lets MPI make progress when there is no request to test: it learns of deaths inside its calls.
pub fn progress() {
    let mut found = 0;
    // SAFETY: the world exists once MPI has been started, and the status is ignored. The result
    // does not matter.
    unsafe {
        let (anyone, world) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_COMM_WORLD);
        ffi::MPI_Iprobe(anyone, 0, world, &mut found, ffi::RSMPI_STATUS_IGNORE);
    }
}

/// The name and version of the library, in one line.
pub fn library() -> String {
    let mut text = [0u8; 8192];
    let mut length = 0;
    // SAFETY: every MPI's MPI_MAX_LIBRARY_VERSION_STRING is at most 8192.
    unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr().cast(), &mut length) };
    let text = text_of(&text, length);
    let first = text.lines().next().unwrap_or_default();
    let name = first.split(',').next().unwrap_or(first).trim();
    name.trim_end_matches('\0').to_string()
}

/// A communicator that returns errors instead of aborting.
#[derive(Debug, Clone, Copy)]
pub struct MpiCommunicator(ffi::MPI_Comm);

// SAFETY: a communicator is a handle that any thread may use; that one thread at a time does is the
// condition at the top of this file.
unsafe impl Send for MpiCommunicator {}
// SAFETY: as above.
unsafe impl Sync for MpiCommunicator {}

impl MpiCommunicator {
    /// `MPI_COMM_WORLD`, which returns errors from now on.
    pub fn world() -> Result<MpiCommunicator, CallFailure> {
        // SAFETY: the world exists once MPI has been started, which the callers have done.
        let world = MpiCommunicator(unsafe { ffi::RSMPI_COMM_WORLD });
        world.return_errors()?;
        Ok(world)
    }

    fn return_errors(self) -> Result<(), CallFailure> {
        // SAFETY: a valid communicator and a predefined handler.
        check(unsafe { ffi::MPI_Comm_set_errhandler(self.0, ffi::RSMPI_ERRORS_RETURN) })
    }

    /// A duplicate with its own message space.
    pub fn duplicate(self) -> Result<MpiCommunicator, CallFailure> {
        // SAFETY: a constant, which the call overwrites.
        let mut other = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: a valid communicator and a local variable.
        check(unsafe { ffi::MPI_Comm_dup(self.0, &mut other) })?;
        let other = MpiCommunicator(other);
        other.return_errors()?;
        Ok(other)
    }

    /// The rank of this process.
    pub fn rank(self) -> Result<usize, CallFailure> {
        let mut rank = 0;
        // SAFETY: a valid communicator and a local variable.
        check(unsafe { ffi::MPI_Comm_rank(self.0, &mut rank) })?;
        Ok(usize::try_from(rank).unwrap_or(0))
    }

    /// The number of processes.
    pub fn size(self) -> Result<usize, CallFailure> {
        let mut size = 0;
        // SAFETY: a valid communicator and a local variable.
        check(unsafe { ffi::MPI_Comm_size(self.0, &mut size) })?;
        Ok(usize::try_from(size).unwrap_or(0))
    }

    /// Revokes it: pending and future operations fail on all processes.
    pub fn revoke(self) -> Result<(), CallFailure> {
        // SAFETY: a valid communicator.
        check(unsafe { encke_mpi_revoke(self.0) })
    }

    /// A communicator of the living processes.
    pub fn shrink(self) -> Result<MpiCommunicator, CallFailure> {
        // SAFETY: a constant, which the call overwrites.
        let mut left = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: a valid communicator and a local variable.
        check(unsafe { encke_mpi_shrink(self.0, &mut left) })?;
        let left = MpiCommunicator(left);
        left.return_errors()?;
        Ok(left)
    }

    /// The ranks of processes that are known to have died.
    pub fn failed(self) -> Result<Vec<usize>, CallFailure> {
        rank_list(self.size()?, |ranks, most, count| {
            // SAFETY: `ranks` has room for `most` entries.
            unsafe { encke_mpi_failed(self.0, ranks, most, count) }
        })
    }

    /// The ranks in this communicator of the processes of `part`, in the order of `part`.
    pub fn ranks_of(self, part: MpiCommunicator) -> Result<Vec<usize>, CallFailure> {
        rank_list(part.size()?, |ranks, most, count| {
            // SAFETY: `ranks` has room for `most` entries.
            unsafe { encke_mpi_members(part.0, self.0, ranks, most, count) }
        })
    }

    /// Starts a send (`MPI_Isend`).
    ///
    /// # Safety
    /// The bytes must stay valid and unchanged until the request has ended.
    pub unsafe fn send(
        self,
        bytes: &[u8],
        to: usize,
        tag: c_int,
    ) -> Result<MpiRequest, CallFailure> {
        let mut request = MpiRequest::none();
        let (start, count) = (bytes.as_ptr().cast(), bytes.len() as c_int);
        // SAFETY: the caller keeps the bytes valid; every piece is at most `LONGEST`, so its length
        // fits into a C int.
        check(unsafe {
            let byte = ffi::RSMPI_UINT8_T;
            ffi::MPI_Isend(start, count, byte, to as c_int, tag, self.0, &mut request.0)
        })?;
        Ok(request)
    }

    /// Starts a receive (`MPI_Irecv`), from one process or from any.
    ///
    /// # Safety
    /// The `count` bytes from `start` must stay valid and must not be accessed until the request
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
        // SAFETY: the caller keeps the bytes valid and does not access them; every piece is at most
        // `LONGEST`, so its length fits into a C int.
        check(unsafe {
            let from = from.map_or(ffi::RSMPI_ANY_SOURCE, |from| from as c_int);
            let byte = ffi::RSMPI_UINT8_T;
            let (start, request) = (start.cast(), &mut request.0);
            ffi::MPI_Irecv(start, count, byte, from, tag, self.0, request)
        })?;
        Ok(request)
    }
}

/// The ranks that a call writes: `fill` gets an array, its length, and a place for their number.
fn rank_list(
    most: usize,
    fill: impl FnOnce(*mut c_int, c_int, *mut c_int) -> c_int,
) -> Result<Vec<usize>, CallFailure> {
    let (mut ranks, mut count) = (vec![0; most], 0);
    check(fill(ranks.as_mut_ptr(), most as c_int, &mut count))?;
    let written = ranks.into_iter().take(usize::try_from(count).unwrap_or(0));
    Ok(written
        .filter_map(|rank: c_int| usize::try_from(rank).ok())
        .collect())
}

/// A pending agreement (`MPIX_Comm_iagree`): it ends when all living processes have started it,
/// with the same result on all of them.
pub struct PendingAgreement {
    /// The conjunction of all flags. Never freed: the agreement may outlive this value.
    flag: *const c_int,
    request: MpiRequest,
}

impl PendingAgreement {
    /// Starts an agreement; it works on a revoked communicator as well.
    pub fn new(comm: MpiCommunicator, ok: bool) -> Result<PendingAgreement, CallFailure> {
        let flag: *mut c_int = Box::leak(Box::new(c_int::from(ok)));
        let mut request = MpiRequest::none();
        // SAFETY: a valid communicator, a flag that is never freed, and a local variable.
        check(unsafe { encke_mpi_iagree(comm.0, flag, &mut request.0) })?;
        Ok(PendingAgreement { flag, request })
    }

    /// The result, once there is one: false if any process passed false or has died.
    pub fn test(&mut self) -> Result<Option<bool>, CallFailure> {
        match self.request.test() {
            Ok(false) => Ok(None),
            // SAFETY: the request has ended, so MPI does not write to the flag any more.
            Ok(true) => Ok(Some(unsafe { *self.flag } != 0)),
            Err(failure) if failure.class == ErrorClass::Dead => Ok(Some(false)),
            Err(failure) => Err(failure),
        }
    }
}

/// A nonblocking operation.
#[derive(Debug)]
pub struct MpiRequest(ffi::MPI_Request);

// SAFETY: a request is a handle that any thread may use, one at a time.
unsafe impl Send for MpiRequest {}

impl MpiRequest {
    /// A request that has ended (`MPI_REQUEST_NULL`).
    pub fn none() -> MpiRequest {
        // SAFETY: a constant of the library.
        MpiRequest(unsafe { ffi::RSMPI_REQUEST_NULL })
    }

    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        // SAFETY: a constant of the library.
        self.0 == unsafe { ffi::RSMPI_REQUEST_NULL }
    }

    /// Lets MPI make progress; returns whether the operation has ended.
    pub fn test(&mut self) -> Result<bool, CallFailure> {
        if self.is_done() {
            return Ok(true);
        }
        let mut done = 0;
        // SAFETY: this value owns the request, and the status is ignored.
        check(unsafe { ffi::MPI_Test(&mut self.0, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        Ok(done != 0)
    }

    /// Asks MPI to cancel the operation. It has ended only when [`MpiRequest::test`] returns true.
    pub fn cancel(&mut self) {
        if !self.is_done() {
            // SAFETY: this value owns the request. If it cannot be cancelled, `test` returns false.
            let _ = check(unsafe { ffi::MPI_Cancel(&mut self.0) });
        }
    }
}
