//! Signals to `encke launch` reach the launcher, which ends all processes, and nothing is left.

use std::time::Duration;

use crate::command::CommandFolder;
use crate::faults::at_work;
use crate::launch::{RunningJob, all_ended, launch, signal};

#[test]
fn signals_to_launch_end_all_processes() {
    let folder = CommandFolder::new();
    folder.succeeds("generate in.safetensors --tokens 16k --heads 4 --dim 64 --grad");
    let arguments = "-n 3 attend in.safetensors -o out.safetensors --grad";
    for name in ["-INT", "-TERM", "-HUP"] {
        let (running, _) = RunningJob::start(&folder, 0, || launch(&folder, arguments));
        at_work(&folder);
        assert!(signal(running.launcher(), name));
        let (status, lines) = running.end(Duration::from_secs(30));
        assert!(!status.success(), "{name}: {lines:?}");
        all_ended(&folder);
        assert_eq!(folder.names(), ["in.safetensors"], "{name}: {lines:?}");
    }
}
