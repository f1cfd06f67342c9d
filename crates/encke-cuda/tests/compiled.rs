//! Compiles programs that cover every kernel, macro and architecture, and in long runs every
//! program for every architecture it runs on, with a gate on spills and serialized wgmma. Needs
//! NVRTC but no GPU; without NVRTC the test prints the reason, skips and passes.
//! `ENCKE_PROGRAMS=mma` compiles only programs whose name or options contain the word.

use std::sync::atomic::{AtomicUsize, Ordering};

use encke_core::conformance::extent;
use encke_cuda::{Nvrtc, Program, compile_warnings, covering, programs};

#[test]
fn programs_compile_without_spills() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            // The README's test command installs NVRTC and sets this, so that CI cannot skip.
            assert!(std::env::var_os("ENCKE_NVRTC").is_none(), "{error}");
            eprintln!("skipped: {error}");
            return;
        }
    };
    let mut all = extent(covering(programs()), programs());
    if let Ok(word) = std::env::var("ENCKE_PROGRAMS") {
        all.retain(|(program, _)| {
            let mut texts = program.options().into_iter();
            program.name.contains(&word) || texts.any(|option| option.contains(&word))
        });
    }
    let compile = |(program, capability): &(Program, (i32, i32))| -> Vec<String> {
        let arch = program.architecture(*capability);
        let (text, options) = (program.text(), program.options());
        match nvrtc.compile(program.name, &text, &arch, &options) {
            Ok(built) => compile_warnings(&built.log)
                .into_iter()
                .map(|line| format!("{} {arch} {options:?}: {line}", program.name))
                .collect(),
            Err(error) => vec![format!("{options:?}: {error}")],
        }
    };
    // Threads share one queue of programs: some take a second, some ten.
    let next = AtomicUsize::new(0);
    let work = || {
        let indices = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        let programs = indices.map_while(|index| all.get(index));
        programs.flat_map(compile).collect::<Vec<_>>()
    };
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    let failures: Vec<String> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let ended = all.into_iter().map(|thread| thread.join());
        ended
            .flat_map(|failures| failures.expect("no thread panics"))
            .collect()
    });
    println!(
        "{} of {} programs compiled by NVRTC {}",
        all.len(),
        programs().len(),
        nvrtc.version()
    );
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
