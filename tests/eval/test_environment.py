"""What is written beside a measurement."""

from gmm_ivf.eval import environment


def test_outside_a_checkout_the_commit_is_what_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "eval" / "environment.py"))
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert environment.stamp(1, "cpu")["commit"] is None
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    assert environment.stamp(1, "cpu")["commit"] == "abc1234"


def test_the_commit_of_a_copy_is_named_by_the_user(monkeypatch):
    """A copy of a working tree may come with the history of another commit."""
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    assert environment.stamp(1, "cpu")["commit"] == "abc1234"
    monkeypatch.setenv("GIT_COMMIT", "")
    assert environment.stamp(1, "cpu")["commit"] != ""
