"""Where installers put programs, for those who look for ours where no PATH leads there: a command sent by ssh."""

PLACES = (
    "$HOME/.local/bin",
    "$HOME/bin",
    "${PIPX_HOME:-$HOME/.local/share/pipx}/venvs/kueue-lab/bin",
    "$HOME/.local/pipx/venvs/kueue-lab/bin",
    "${UV_TOOL_DIR:-$HOME/.local/share/uv/tools}/kueue-lab/bin",
    "$HOME/.local/share/kueue/bin",
    "$HOME/venv/bin",
    "$HOME/.venv/bin",
    "$HOME/kueue/bin",
    "$HOME/miniforge3/bin",
    "$HOME/mambaforge/bin",
    "$HOME/miniconda3/bin",
    "$HOME/anaconda3/bin",
    "/opt/conda/bin",
    "/opt/kueue/bin",
)
"""Where pip --user, pipx (new and old), uv, a virtual environment and conda put programs, for the words of ``sh``."""
