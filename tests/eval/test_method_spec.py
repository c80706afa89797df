"""The grammar of --method."""

import pytest

from gmm_ivf.eval.method_spec import label, parse_method, rule_of
from gmm_ivf.rules import Air, Soar, Spann


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("kmeans", "kmeans"),
        (" gmm ", "gmm"),
        ("gmm-soft", "gmm-soft"),
        ("gmm-soft:replication=1.5,max_lists=2", "gmm-soft"),
        ("gmm-soft:tau=1/K,max_lists=8", "gmm-soft:max_lists=8,tau=1/K"),
        ("gmm-soft:max_lists=8, tau=1/K", "gmm-soft:max_lists=8,tau=1/K"),
        ("gmm-soft:tau=0.50/K", "gmm-soft:tau=0.5/K"),
        ("gmm-soft:tau=1e-6", "gmm-soft:tau=1e-06"),
        ("gmm-soft:replication=2", "gmm-soft:replication=2.0"),
        ("gmm:covariance_type=diag", "gmm:covariance_type=diag"),
        ("gmm:covariance_type=spherical", "gmm"),
        ("kmeans:niter=10", "kmeans:niter=10"),
        ("gmm-soft:rule=responsibility", "gmm-soft"),
        ("gmm-soft:rule=air,lambda=0.5,max_lists=2", "gmm-soft:rule=air"),
        ("gmm-soft:strict=true,rule=soar", "gmm-soft:rule=soar,strict=True"),
        ("kmeans-soft:rule=air,strict=false", "kmeans-soft"),
        ("gmm-soft:adaptive=false", "gmm-soft"),
        ("kmeans-soft:max_lists=1,adaptive=true", "kmeans-soft:adaptive=True,max_lists=1"),
        ("kmeans-soft:rule=spann,eps=0.20", "kmeans-soft:eps=0.2,rule=spann"),
        ("kmeans-soft:niter=5,rule=top2", "kmeans-soft:niter=5,rule=top2"),
        ("kmeans:coarse=hnsw32,nlist=4096", "kmeans:coarse=hnsw32,nlist=4096"),
        ("kmeans:coarse=flat,codec=Flat,refine=false,rotation=none", "kmeans"),
        ("gmm:refine=true,codec=PQ32x4fs", "gmm:codec=PQ32x4fs,refine=True"),
        ("gmm-soft:codec=SQ8,coarse=hnsw16", "gmm-soft:coarse=hnsw16,codec=SQ8"),
        ("gmm-cells:visit=edge,links=64", "gmm-cells:links=64"),
        ("kmeans-cells:sketch=0,visit=list", "kmeans-cells:sketch=0,visit=list"),
    ],
)
def test_canonical_spelling_is_stable(text, canonical):
    spec = parse_method(text)
    assert str(spec) == canonical
    assert parse_method(str(spec)) == spec


def test_threshold_in_units_of_one_over_K():
    assert parse_method("gmm-soft:tau=2/K").get("tau").resolve(50) == pytest.approx(0.04)
    assert parse_method("gmm-soft:tau=0.3").get("tau").resolve(50) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kmeanz", "unknown method 'kmeanz'; known methods: kmeans, gmm, gmm-soft"),
        ("", "known methods"),
        ("gmm:tau=1/K", "no such option 'tau=1/K'.*covariance_type"),
        ("gmm-soft:tau", "write key=value"),
        ("gmm-soft:", "write key=value"),
        ("gmm-soft:tau=1/K,tau=2/K", "repeated option"),
        ("gmm-soft:tau=1/N", "tau must be a number above 0 or a multiple of 1/K.*got '1/N'"),
        ("gmm-soft:tau=0", "tau must be"),
        ("gmm-soft:tau=nan", "tau must be"),
        ("gmm-soft:max_lists=0", "max_lists must be a whole number of at least 1, got '0'"),
        ("gmm-soft:max_lists=1.5", "whole number"),
        ("gmm-soft:replication=0.5", "replication must be a number of at least 1, got '0.5'"),
        ("gmm-soft:replication=nan", "replication must be"),
        ("gmm-soft:tau=1/K,replication=1.5", "tau or replication, not both"),
        ("gmm-soft:rule=air,tau=1/K", "rule air has no option tau; those it has are lambda"),
        ("gmm-soft:rule=soar,replication=1.5", "rule soar has no option replication"),
        ("gmm-soft:lambda=1", "rule responsibility has no option lambda"),
        ("kmeans-soft:rule=top2,strict=true", "rule top2 has no option strict.* none"),
        ("kmeans-soft:rule=ratio,eps=-1", "eps must be a finite number of at least 0; got -1.0"),
        ("kmeans-soft:lambda=x", "lambda must be a number, got 'x'"),
        ("kmeans-soft:strict=1", "strict must be true or false, got '1'"),
        ("kmeans-soft:rule=responsibility", "rule must be one of air, soar, spann, top2, ratio"),
        ("kmeans-soft:tau=1/K", "no such option 'tau=1/K'"),
        ("kmeans:codec=PQ", "codec must be a codec of FAISS: Flat, SQ8.*got 'PQ'"),
        ("kmeans:coarse=hnsw", "coarse must be flat or hnsw with its number of links.*got 'hnsw'"),
        ("kmeans:rotation=PCA8", "rotation must be none, RR .* got 'PCA8'"),
        ("gmm-soft:rotation=RR", "no such option 'rotation=RR'"),
        ("gmm-cells:visit=all", "visit must be one of edge, list, got 'all'"),
        ("gmm-cells:sketch=-1", "sketch must be a whole number of at least 0, got '-1'"),
        ("gmm:covariance_type=round", "one of spherical, diag, tied, full, got 'round'"),
    ],
)
def test_errors_name_what_was_wanted_and_what_came(text, words):
    with pytest.raises(ValueError, match=words):
        parse_method(text)


def test_rule_of_a_method_has_its_options():
    assert rule_of(parse_method("gmm-soft:tau=1/K")) == "responsibility"
    assert rule_of(parse_method("kmeans-soft")) == Air()
    assert rule_of(parse_method("gmm-soft:rule=soar,lambda=0.3,strict=true")) == Soar(0.3, True)
    spann = parse_method("gmm-soft:rule=spann,rng_factor=1.2,eps=0.1,candidates=9,max_lists=8")
    assert rule_of(spann) == Spann(1.2, 0.1, 9)


def test_a_spec_without_an_option():
    spec = parse_method("kmeans:coarse=hnsw32,nlist=4096")
    assert str(spec.without("nlist")) == "kmeans:coarse=hnsw32"
    assert spec.without("codec") == spec


def test_labels_say_what_the_default_stores():
    assert label("kmeans") == "k-means"
    assert label("gmm-soft") == "GMM, soft (replication 1.5)"
    assert label("gmm-soft:tau=1/K") == "GMM, soft (tau 1/K)"
    assert label("gmm-soft:rule=soar,strict=true") == "GMM, soft (rule soar, strict True)"
    assert label("kmeans-soft") == "k-means, soft (rule air)"
    assert label("gmm:covariance_type=diag") == "GMM, hard (covariance_type diag)"
