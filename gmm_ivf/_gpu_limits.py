"""What faiss-gpu can do, asked before it ends in a C++ error."""

from typing import Any

from gmm_ivf._faiss import faiss
from gmm_ivf._layout import ProbeOptions

#: Most results and most lists per query of a search on a GPU.
GPU_LIMIT = 2048

_PQ_BYTES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
# Look-up tables of float32 for more bytes than these do not fit a block's shared memory.
_FLOAT32_TABLES = 48
_SQ_TYPES = ("8bit", "8bit_uniform", "8bit_direct", "6bit", "4bit", "4bit_uniform", "fp16")


def check_device(device: int) -> None:
    """Check that faiss has GPU support, and that GPU.

    Raises
    ------
    RuntimeError, ValueError
    """
    if not hasattr(faiss, "StandardGpuResources"):
        raise RuntimeError(
            "this faiss was built without GPU support: uninstall faiss-cpu, then pip install "
            '"gmm-ivf[gpu]" (never two faiss packages at once).'
        )
    count = faiss.get_num_gpus()
    if not 0 <= device < count:
        raise ValueError(f"device must be in [0, {count}), the GPUs that faiss sees; got {device}.")


def check_codec(ivf: Any) -> None:
    """Refuse a codec that faiss-gpu does not have.

    Raises
    ------
    NotImplementedError
    """
    reason = _codec_reason(ivf)
    if reason:
        raise NotImplementedError(f"{type(ivf).__name__} on a GPU: {reason}.")


def _codec_reason(ivf: Any) -> str:
    """Why faiss-gpu has no such codec, "" if it has."""
    if isinstance(ivf, faiss.IndexIVFPQ):
        if ivf.pq.nbits != 8:
            return f"faiss-gpu has codes of 8 bits only, this one has {ivf.pq.nbits}"
        if ivf.pq.M not in _PQ_BYTES:
            return f"faiss-gpu has codes of {', '.join(map(str, _PQ_BYTES))} bytes, not {ivf.pq.M}"
        return ""
    if isinstance(ivf, faiss.IndexIVFScalarQuantizer):
        known = {getattr(faiss.ScalarQuantizer, f"QT_{name}") for name in _SQ_TYPES}
        return "" if ivf.sq.qtype in known else f"faiss-gpu has SQ of {', '.join(_SQ_TYPES)} only"
    if type(ivf) is faiss.IndexIVFFlat:
        return ""
    return "faiss-gpu has Flat, SQ and PQ of 8 bits only"


def refuse_selector(options: ProbeOptions) -> None:
    """Refuse a selector, which faiss-gpu does not heed.

    Raises
    ------
    NotImplementedError
    """
    if options.selector is not None:
        raise NotImplementedError("params.sel is not available on a GPU: leave it unset.")


def refuse_max_codes(options: ProbeOptions) -> None:
    """Refuse a limit on the entries scanned, which faiss-gpu does not heed.

    Raises
    ------
    NotImplementedError
    """
    if options.max_codes:
        raise NotImplementedError(
            f"max_codes={options.max_codes} is not available on a GPU but for cells: leave it 0."
        )


def check_limits(k: int, fetch: int, lists: int, name: str) -> None:
    """Refuse a search beyond what faiss-gpu can do, which would end in a C++ error.

    Parameters
    ----------
    k : int
        Results wanted per query.
    fetch : int
        Entries that it takes to have them.
    lists : int
        Lists to scan per query.
    name : str
        What the caller calls those.

    Raises
    ------
    ValueError
    """
    if lists > GPU_LIMIT:
        raise ValueError(
            f"{name} must be at most {GPU_LIMIT} on a GPU; got {lists}. Search on the CPU."
        )
    if fetch > GPU_LIMIT:
        copies = (
            "" if fetch == k else f", for which {fetch} entries are fetched since ids have copies"
        )
        raise ValueError(
            f"a search on a GPU fetches at most {GPU_LIMIT} entries per query; k={k}{copies}. "
            "Lower k, or search on the CPU."
        )


def on_gpu(index: Any, resources: Any, device: int) -> Any:
    """Copy of an index on a GPU, by the classic kernels.

    Parameters
    ----------
    index : faiss.IndexFlat or faiss.IndexIVF
    resources : faiss.StandardGpuResources
    device : int
    """
    options = faiss.GpuClonerOptions()
    # cuVS would be another search, with limits and roundings of its own.
    options.use_cuvs = False
    if not isinstance(index, faiss.IndexIVF):
        return faiss.index_cpu_to_gpu(resources, device, index, options)
    if isinstance(index, faiss.IndexIVFPQ):
        options.useFloat16 = index.pq.M > _FLOAT32_TABLES
    # Searches say themselves how many lists they probe; a copy may not be made with too many.
    nprobe, index.nprobe = index.nprobe, 1
    try:
        return faiss.index_cpu_to_gpu(resources, device, index, options)
    finally:
        index.nprobe = nprobe
