"""Make ``sift-mini.hdf5``, the data set bundled with the package, from photographs in two wheels.

Needs opencv-python-headless, scikit-image, scikit-learn and h5py, which the project itself does not
all depend on; use an environment of its own:

    python -m venv /tmp/siftenv
    /tmp/siftenv/bin/pip install opencv-python-headless scikit-image scikit-learn h5py
    /tmp/siftenv/bin/python -m gmm_ivf.datasets.make_sift_mini --out datasets/sift-mini.hdf5

No pixel serves both sides: a query comes from a photograph that gives no base vector, or from the
right-hand strip of one, cut off before the descriptors are computed. ``sift-mini-attribution.md``
names the authors and licences of the photographs.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import cv2  # pyright: ignore[reportMissingImports]
import h5py
import numpy as np

# Left as they are: photographs without descriptors enough for a strip of their own, and both halves
# of the stereo pair, which show the same scene and so must lie on one side of the split.
BASE_ONLY = (
    "skimage/data/astronaut.png",
    "skimage/data/camera.png",
    "skimage/data/clock_motion.png",
    "skimage/data/coffee.png",
    "skimage/data/coins.png",
    "skimage/data/motorcycle_left.png",
    "skimage/data/motorcycle_right.png",
    "sklearn/datasets/images/flower.jpg",
)
QUERY_ONLY = (
    "skimage/data/chelsea.png",
    "skimage/data/rocket.jpg",
    "sklearn/datasets/images/china.jpg",
)
CUT = (
    "skimage/data/brick.png",
    "skimage/data/grass.png",
    "skimage/data/gravel.png",
    "skimage/data/hubble_deep_field.jpg",
    "skimage/data/ihc.png",
    "skimage/data/retina.jpg",
)
QUERY_STRIP = 0.06  # share of the width of a cut photograph
SETTINGS = {"contrastThreshold": 0.01, "edgeThreshold": 20.0}
N_QUERY = 1_500
K = 100


def site_file(name: str) -> Path:
    """Path of a file inside an installed package, without importing the package."""
    package, _, rest = name.partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; the first lines of this script say what is")
    return Path(spec.origin).parent / rest


def read_grey(name: str) -> np.ndarray:
    """Grey picture, uint8 [height, width]."""
    picture = cv2.imread(str(site_file(name)), cv2.IMREAD_GRAYSCALE)
    if picture is None:
        raise SystemExit(
            f"{name} is missing in this version of the wheel, or OpenCV cannot read it"
        )
    return picture


def describe(picture: np.ndarray) -> np.ndarray:
    """SIFT descriptors of one picture, uint8 [n, 128]; OpenCV's are whole numbers in 0..255."""
    _, found = cv2.SIFT_create(**SETTINGS).detectAndCompute(np.ascontiguousarray(picture), None)
    return found.astype(np.uint8)


def pools() -> tuple[np.ndarray, np.ndarray]:
    """All descriptors for the base and all for the queries, uint8 [n, 128] each."""
    base = [describe(read_grey(name)) for name in BASE_ONLY]
    query = [describe(read_grey(name)) for name in QUERY_ONLY]
    for name in CUT:
        picture = read_grey(name)
        border = round(picture.shape[1] * (1 - QUERY_STRIP))
        base.append(describe(picture[:, :border]))
        query.append(describe(picture[:, border:]))
    return np.concatenate(base), np.concatenate(query)


def first_of_equals(x: np.ndarray) -> np.ndarray:
    """Row numbers that keep one of each group of equal rows, in their order."""
    return np.sort(np.unique(x, axis=0, return_index=True)[1])


def exact(base: np.ndarray, query: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers and squared distances of the k nearest, int64 [Q, k] each, ties by lower number.

    Every product and sum is a whole number below 2**24, so float32 gives it exactly.
    """
    x = base.astype(np.float32)
    norms = np.square(x).sum(axis=1)
    ids = np.empty((len(query), k), np.int64)
    squared = np.empty_like(ids)
    for first in range(0, len(query), 200):
        q = query[first : first + 200].astype(np.float32)
        d2 = norms - 2 * (q @ x.T) + np.square(q).sum(axis=1, keepdims=True)
        # One sortable number holds the distance and, below it, the row number that breaks ties.
        key = d2.astype(np.int64) * len(x) + np.arange(len(x))
        best = np.sort(np.partition(key, k - 1, axis=1)[:, :k], axis=1)
        squared[first : first + 200], ids[first : first + 200] = np.divmod(best, len(x))
    return ids, squared


def nearest_mean(base: np.ndarray, query: np.ndarray) -> float:
    """Mean distance from a query to its nearest base vector."""
    return float(np.sqrt(exact(base, query, 1)[1]).mean())


def write(path: Path, base: np.ndarray, query: np.ndarray, notes: dict) -> None:
    """Write the ann-benchmarks layout with ground truth, the same bytes on every run."""
    ids, squared = exact(base, query, K)
    columns = {
        "train": base,
        "test": query,
        "neighbors": ids.astype(np.int32),
        "distances": np.sqrt(squared).astype(np.float32),
    }
    with h5py.File(path, "w", track_order=False) as file:
        for name, values in columns.items():
            # One chunk: readers want all of it, and gzip finds more in one piece.
            file.create_dataset(
                name,
                data=values,
                chunks=values.shape,
                compression="gzip",
                compression_opts=9,
                shuffle=values.itemsize > 1,
                track_times=False,
            )
        file.attrs.update(distance="euclidean", point_type="float", dimension=128, **notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("sift-mini.hdf5"))
    parser.add_argument("--seed", type=int, default=0, help="order of the base, choice of queries")
    args = parser.parse_args()

    rng = np.random.default_rng(args.seed)
    base, query = pools()
    found = len(base) + len(query)
    both = first_of_equals(np.concatenate([base, query]))
    base, query = base[both[both < len(base)]], query[both[both >= len(base)] - len(base)]
    print(f"{found} descriptors, {found - len(both)} exact duplicates dropped")
    print(f"base {len(base)}, queries to choose from {len(query)}")
    base = base[rng.permutation(len(base))]
    chosen = query[rng.permutation(len(query))[:N_QUERY]]

    mixed = rng.permutation(np.concatenate([base, query]))
    held_out, random_split = nearest_mean(base, chosen), nearest_mean(mixed[1000:], mixed[:1000])
    print(
        f"mean distance to the nearest: held-out {held_out:.1f}, random split {random_split:.1f}, "
        f"ratio {held_out / random_split:.3f}"
    )

    notes = {
        "source": "OpenCV SIFT of photographs in the scikit-image and scikit-learn wheels",
        "query_split": "held-out photographs and strips of photographs",
        "seed": args.seed,
        "opencv": cv2.__version__,
        "mean_nearest_distance": held_out,
        "mean_nearest_distance_of_a_random_split": random_split,
    }
    write(args.out, base, chosen, notes)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
