//! Resizing a ring, in lockstep and as threads: the same rows and bytes.

use std::time::Duration;

use encke_core::conformance::Random;
use encke_core::naive::NaiveKernel;
use encke_core::plan::resize::Resize;
use encke_core::sharding::{Cut, Sharding};
use encke_core::{DType, Tensor};
use encke_ring::{Sharded, ThreadRing};
use encke_sim::lockstep;

#[test]
fn resizing_to_four_three_six_and_one_ranks_is_the_same_in_lockstep_and_as_threads() {
    let mut random = Random::new(5);
    let dims = [2, 77, 3, 4];
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| random.unit()).collect();
    let whole = Tensor::from_f64(DType::F32, dims, &values).unwrap();
    let threads = ThreadRing::new(NaiveKernel, Duration::from_secs(60));
    let rings = [
        Sharding::new(4, Cut::Zigzag).unwrap(),
        Sharding::new(3, Cut::Striped).unwrap(),
        Sharding::new(6, Cut::Firsts(vec![0, 0, 30, 31, 70, 77])).unwrap(),
        Sharding::contiguous(1).unwrap(),
    ];
    let mut sharded = Sharded::split(&whole.view(), &rings[0]).unwrap();
    for (from, to) in rings.iter().zip(&rings[1..]) {
        let resize = Resize::new(from, to, dims[1]).unwrap();
        let stepped = lockstep::resize(&NaiveKernel, &resize, &[&sharded]).unwrap();
        let threaded = threads.resize(&resize, &[&sharded]).unwrap();
        assert_eq!(stepped.tensors, threaded.tensors);
        let planned = resize.sent_bytes(&[sharded.moving()]);
        assert_eq!(stepped.trace.sent_bytes(), planned);
        assert_eq!(threaded.trace.sent_bytes(), planned);
        sharded = stepped.tensors.into_iter().next().unwrap();
        assert_eq!(sharded, Sharded::split(&whole.view(), to).unwrap());
    }
    assert_eq!(sharded.gather().unwrap(), whole);
}
