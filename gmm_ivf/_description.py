"""Names of index types as `index_factory` takes them: grammar, codecs and transforms."""

import re
from dataclasses import dataclass
from typing import Any

from gmm_ivf._faiss import faiss

GRAMMAR = "[prefix,]GMM<K>[x<max_lists> | cells<links>][_HNSW<M>],<codec>[,RFlat]"
PREFIXES = "OPQ<M>[_<d>], PCA[W][R]<d>, RR<d>, L2norm"
CODECS = (
    "Flat, SQ8, SQ6, SQ4, SQfp16, SQbf16, PQ<M>[x<bits>], PQ<M>x4fs, PQ<M>x4fsr, RaBitQ[<bits>], "
    "RaBitQfs"
)
_PREFIX = re.compile(
    r"OPQ(?P<M>[1-9]\d*)(?:_(?P<opq>[1-9]\d*))?|PCAW?R?(?P<pca>[1-9]\d*)|RR(?P<rr>[1-9]\d*)|L2norm"
)
_GMM = re.compile(r"GMM([1-9]\d*)(?:x([1-9]\d*)|cells([1-9]\d*)?)?(?:_HNSW([1-9]\d*))?")
# FAISS does not survive the use of a PQ of 0 bits.
_PQ = r"PQ[1-9]\d*"
_CODEC = re.compile(
    rf"Flat|SQ(8|6|4|fp16|bf16)|{_PQ}(x[1-9]\d*)?|{_PQ}x4fsr?|RaBitQ[1-9]?|RaBitQfs"
)
_SQ = faiss.ScalarQuantizer
_SQ_NAMES = {
    _SQ.QT_8bit: "SQ8",
    _SQ.QT_6bit: "SQ6",
    _SQ.QT_4bit: "SQ4",
    _SQ.QT_fp16: "SQfp16",
    _SQ.QT_bf16: "SQbf16",
}


@dataclass(frozen=True)
class Description:
    """A parsed description.

    Attributes
    ----------
    prefixes : tuple of str
    nlist : int
    max_lists : int
        1 where nothing else was said.
    cells : bool
    links : int or None
        Of cells; None for the default.
    hnsw : int or None
        Links per node of a graph over the means.
    codec : str
    refine : bool
    """

    prefixes: tuple[str, ...]
    nlist: int
    max_lists: int
    cells: bool
    links: int | None
    hnsw: int | None
    codec: str
    refine: bool

    @property
    def plain_codec(self) -> str:
        """The codec that FAISS converts to FastScan, or the codec itself."""
        return re.sub("fsr?$", "", self.codec)

    @property
    def fast_scan(self) -> bool:
        """Whether lists are packed for FastScan."""
        return self.plain_codec != self.codec

    def __str__(self) -> str:
        gmm = f"GMM{self.nlist}"
        if self.cells:
            gmm += f"cells{self.links or ''}"
        elif self.max_lists > 1:
            gmm += f"x{self.max_lists}"
        if self.hnsw:
            gmm += f"_HNSW{self.hnsw}"
        return ",".join([*self.prefixes, gmm, self.codec, *(["RFlat"] * self.refine)])


def _refused(text: str, token: str, wanted: str) -> ValueError:
    return ValueError(f"description {text!r}: {token!r} is not {wanted}. The form is {GRAMMAR}.")


def _tokens(text: str) -> tuple[list[str], str, list[str]]:
    """What stands before GMM<K>, that, and what stands behind it."""
    if not isinstance(text, str):
        raise ValueError(f"description must be a string such as 'GMM1024x2,PQ32'; got {text!r}.")
    tokens = text.split(",")
    places = [i for i, token in enumerate(tokens) if token.startswith("GMM")]
    if len(places) != 1:
        raise ValueError(
            f"description {text!r} must hold one GMM<K>; it has {len(places)}. The form is "
            f"{GRAMMAR}."
        )
    return tokens[: places[0]], tokens[places[0]], tokens[places[0] + 1 :]


def parse(text: str) -> Description:
    """Read a description.

    Raises
    ------
    ValueError
        Naming the token at fault, and what may stand there.
    """
    prefixes, gmm, rest = _tokens(text)
    for token in prefixes:
        if not _PREFIX.fullmatch(token):
            raise _refused(text, token, f"a prefix ({PREFIXES})")
    match = _GMM.fullmatch(gmm)
    if not match:
        raise _refused(text, gmm, "GMM<K>[x<max_lists> | cells<links>][_HNSW<M>]")
    codec, *more = rest or [""]
    if not _CODEC.fullmatch(codec):
        raise _refused(text, codec, f"a codec ({CODECS})")
    if more not in ([], ["RFlat"]):
        raise _refused(text, ",".join(more), "RFlat, which is all that may follow the codec")
    if "cells" in gmm and re.search("fsr?$", codec):
        raise ValueError(
            f"description {text!r}: {codec!r} does not go with cells, which are smaller than the "
            f"blocks of FastScan; take {re.sub('fsr?$', '', codec)!r}."
        )
    nlist, max_lists, links, hnsw = (int(part) if part else None for part in match.groups())
    if re.fullmatch(r"PQ\d+x8", codec):
        codec = codec.removesuffix("x8")
    cells = "cells" in gmm
    return Description(
        tuple(prefixes), nlist or 0, max_lists or 1, cells, links, hnsw, codec, bool(more)
    )


def check_prefixes(prefixes: tuple[str, ...], d: int, text: str) -> None:
    """Refuse transforms that FAISS makes of any numbers, and cannot train.

    Raises
    ------
    ValueError
        Naming the token and the dimensions that go into it.
    """
    for token in prefixes:
        match = _PREFIX.fullmatch(token)
        given = (
            {name: int(size) for name, size in match.groupdict().items() if size} if match else {}
        )
        parts = given.pop("M", 1)
        behind = next(iter(given.values()), d)
        if behind % parts:
            reason = f"M has to divide the {behind} dimensions behind it"
        elif behind > d and "pca" in given:
            reason = "there are no more dimensions than that"
        else:
            d = behind
            continue
        raise ValueError(f"description {text!r}: {token!r} of {d} dimensions: {reason}.")


def codec_name(ivf: Any, fast_scan: bool) -> str | None:
    """Codec of an IVF index, None where `index_factory` has no name for it."""
    residual = getattr(ivf, "by_residual", False)
    if type(ivf) is faiss.IndexIVFFlat:
        return "Flat"
    if type(ivf) is faiss.IndexIVFScalarQuantizer and residual:
        return _SQ_NAMES.get(ivf.sq.qtype)
    if type(ivf) is faiss.IndexIVFPQ:
        if fast_scan:
            return f"PQ{ivf.pq.M}x4fs{'r' * residual}"
        name = f"PQ{ivf.pq.M}" + (f"x{ivf.pq.nbits}" if ivf.pq.nbits != 8 else "")
        return name if residual else None
    if type(ivf) is faiss.IndexIVFRaBitQ and residual:
        bits = ivf.rabitq.nb_bits
        return f"RaBitQ{bits if bits > 1 else ''}{'fs' * fast_scan}"
    return None


def prefix_names(index: Any) -> tuple[str, ...] | None:
    """Transforms before the lists; None where `index_factory` has no name for one."""
    if not isinstance(index, faiss.IndexPreTransform):
        return ()
    chain = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(index.chain.size())]
    names = [_prefix_name(transform) for transform in chain]
    return None if None in names else tuple(name for name in names if name)


def _prefix_name(transform: Any) -> str | None:
    d = transform.d_out
    if isinstance(transform, faiss.OPQMatrix):
        return f"OPQ{transform.M}" + (f"_{d}" if d != transform.d_in else "")
    if isinstance(transform, faiss.PCAMatrix):
        white, rotated = transform.eigen_power == -0.5, transform.random_rotation
        return f"PCA{'W' * white}{'R' * rotated}{d}"
    if isinstance(transform, faiss.RandomRotationMatrix):
        return f"RR{d}"
    return "L2norm" if isinstance(transform, faiss.NormalizationTransform) else None
