//! What several tests of the simulator share.

use encke_core::conformance::Configuration;
use encke_core::plan::program::Role;
use encke_core::{MixingGradient, Mode, OffsetRule, Pattern, Tensor};

/// The configuration with detached mixing gradients, which keep one slot for each branch.
pub fn with_slots(configuration: &Configuration) -> Configuration {
    let mut configuration = configuration.clone();
    let pattern = &configuration.request.pattern;
    let segments: Vec<usize> = pattern.branches().iter().map(|b| b.segment).collect();
    let dilations: Vec<usize> = pattern.branches().iter().map(|b| b.dilation).collect();
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let causal = pattern.is_causal();
    let detached = Pattern::dilated(&segments, &dilations, mode).expect("sizes are positive");
    configuration.request.pattern = detached.causal(causal);
    configuration
}

/// The bytes of outputs.
pub fn bits(tensors: &[(Role, Tensor)]) -> Vec<(Role, Vec<u8>)> {
    let bytes = |tensor: &Tensor| tensor.data().bytes().to_vec();
    let each = tensors.iter().map(|(role, tensor)| (*role, bytes(tensor)));
    each.collect()
}
