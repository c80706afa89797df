"""Methods of a FAISS index that `IndexIVFGMM` does not have yet, refused in one place."""

from typing import Any

_REASONS = {
    "add_core": "use add_preassigned, which checks the lists",
    "add_sa_codes": "add the vectors themselves",
    "sa_encode": "the code of a vector depends on its list: use that of `index`",
    "sa_decode": "the code of a vector depends on its list: use reconstruct",
    "search_and_return_codes": "use search_and_reconstruct",
    "range_search_preassigned": "use range_search",
    "replace_invlists": "the lists belong to this index",
    "copy_subset_to": "add the vectors to a new index",
    "make_direct_map": "a direct map keeps one place per id and would lose copies",
    "set_direct_map_type": "a direct map keeps one place per id and would lose copies",
}


def _refusal(name: str, way: str):
    def method(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"IndexIVFGMM.{name} is not available: {way}.")

    method.__name__ = name
    method.__doc__ = f"Not available: {way}."
    return method


class Unsupported:
    """Base that answers each missing method with NotImplementedError and one sentence."""


for _name, _way in _REASONS.items():
    setattr(Unsupported, _name, _refusal(_name, _way))
