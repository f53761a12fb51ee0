"""Faults planted in the Metal text of the kernels: each must fail at least one of the cases named for it."""

import pytest

from tests.kernel_mutants import caught
from tests.metal_emulation.emulator import EmulatedMetal, MetalFault, compile_all, generated, unavailable
from veloxquant_mlx.metal._kernel import using
from veloxquant_mlx.selftest.case import Case, Mutation
from veloxquant_mlx.selftest.cases import CASES, MUTATIONS
from veloxquant_mlx.selftest.run import check, dispatches

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

table = {case.id: case for case in CASES}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile on every core what the selected mutations will run."""
    selected = {item.name for item in request.session.items}
    texts = []
    for mutation in MUTATIONS:
        if f"test_mutation_is_found[{mutation.id}]" in selected:
            for d in dispatches(cases_of(mutation)):
                texts.append(generated(d.kernel, d.inputs, d.template, d.outputs).replace(mutation.old, mutation.new))
    compile_all(texts)


def cases_of(mutation: Mutation) -> list[Case]:
    return [table[f"{mutation.function}-{name}"] for name in mutation.cases]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.id)
def test_mutation_is_found(mutation: Mutation) -> None:
    reached = False

    def plant(text: str) -> str:
        nonlocal reached
        reached |= mutation.old in text
        return text.replace(mutation.old, mutation.new)

    found = []
    for case in cases_of(mutation):
        try:
            with using(EmulatedMetal(mutate=plant)):
                problem = check(case)
        except MetalFault as fault:
            problem = str(fault)
        if problem is not None:
            found.append(problem)
    assert reached, f"{mutation.old!r} is not in the text of any kernel that ran"
    assert found, "every case passed"
    if mutation.fault is not None:
        assert any(mutation.fault in problem for problem in found), found
    else:
        assert not any("does not compile" in problem for problem in found), found
    caught.add((mutation.function, "metal"))


def test_mutations_are_unique() -> None:
    names = [mutation.id for mutation in MUTATIONS]
    assert len(names) == len(set(names))
