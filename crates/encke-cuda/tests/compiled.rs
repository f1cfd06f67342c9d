//! Every program compiled for every architecture it is meant for, with a gate on spills and slow
//! paths. Needs NVRTC but no GPU; without NVRTC it says so and passes, because it cannot know.

use encke_cuda::{Nvrtc, complaints, programs};

#[test]
fn every_program_compiles_without_spills() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            // The README's test command installs NVRTC and sets this, so that CI cannot skip.
            assert!(std::env::var_os("ENCKE_NVRTC").is_none(), "{error}");
            eprintln!("skipped: {error}");
            return;
        }
    };
    let mut failures = Vec::new();
    let mut compiled = 0;
    for (program, capability) in programs() {
        let arch = program.architecture(capability);
        let (text, options) = (program.text(), program.options());
        match nvrtc.compile(program.name, &text, &arch, &options) {
            Ok(built) => {
                compiled += 1;
                for line in complaints(&built.log) {
                    failures.push(format!("{} {arch} {options:?}: {line}", program.name));
                }
            }
            Err(error) => failures.push(format!("{options:?}: {error}")),
        }
    }
    println!("{compiled} programs compiled by NVRTC {}", nvrtc.version());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
