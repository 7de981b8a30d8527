"""The head of a planned recipe names the command that trains on its machine."""
import pytest
import yaml

from planning.plan import Job
from planning.recipe import recipe_of, recipe_text
from trainer.config.schema import MeshConfig


@pytest.mark.parametrize(("topology", "command"), [
    ("v5e:2x4", ["# Command   eval"]),
    ("v5p:2x2x4", ["# Command   scripts/launch_tpu.sh run"]),
    ("2xv5e:4x4", ["# Command   # on each of 8 hosts:", "#           eval"]),
    ("v5p:4x4x1", ["# Command   # on each of 4 hosts:", "#           eval"]),
    ("h100:2x8", ["# Command   sbatch --nodes 2"]),
])
def test_a_command_that_each_host_has_to_run_says_so(topology, command):
    job = Job.of("llama-3.1-8b", topology, 8192)
    recipe = recipe_of(job, {}, None)
    text = recipe_text(job, recipe, "recipe.yaml", None)
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("# Command"))
    for line, beginning in zip(lines[start:], [*command, "# Check "], strict=False):
        assert line.startswith(beginning), line
    assert yaml.safe_load(text) == recipe


def test_a_mesh_is_written_with_its_order():
    mesh = MeshConfig(fsdp=2, sequence=4, order=("sequence", "data", "fsdp", "tensor"))
    recipe = recipe_of(Job.of("llama-3.1-8b", "h100:8", 8192, mesh=mesh), {}, None)
    written = yaml.safe_load(yaml.safe_dump(recipe))["mesh"]
    assert written == {"fsdp": 2, "sequence": 4, "order": list(mesh.order)}
