"""How Sphinx builds the site; `make docs` runs it. Nothing here reaches for the network."""

import html
import json
import logging
import os
import re
import sys
import warnings
from importlib.metadata import metadata
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from generated_tables import write_tables
from moved import write_redirects
from public_address import head_tags

project = "yobx_flatten"
author = "The yobx_flatten authors"
copyright = "2026, The yobx_flatten authors"
release = version_of("yobx-flatten")
version = release

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]

exclude_patterns = [
    "tables",
    "examples",
    "_build",
    *(f"auto_examples/{place}.{kind}" for place in ("*", "**/*") for kind in ("ipynb", "md5", "py")),
]
suppress_warnings = ["config.cache"]  # sphinx-gallery's settings hold functions, which Sphinx cannot pickle

# --- pages ------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make notebooks` runs them
nb_merge_streams = True
myst_html_meta = {
    "description": "Export PyTorch and Hugging Face models with their KV cache to ONNX and other runtimes, checked "
    "against the eager model; fine-tune models larger than the GPU.",
    "keywords": "PyTorch, torch.export, ONNX, KV cache, DynamicCache, pytree, onnxruntime, OpenVINO, ExecuTorch, "
    "fine-tuning, CPU offload, pipeline parallelism",
}
html_theme = "furo"
html_title = f"yobx_flatten and roundpipe_runtime {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js", "fold.js"]
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
# Once `[project.urls]` of pyproject.toml has the public addresses, and they are set nowhere else, pages link to their
# sources, and shared links have a picture.
_links = dict(link.split(", ", 1) for link in metadata("yobx-flatten").get_all("Project-URL") or [])
if "Source" in _links:
    html_theme_options = {"source_repository": _links["Source"], "source_branch": "main", "source_directory": "docs/"}
if "Documentation" in _links:
    html_baseurl = _links["Documentation"].rstrip("/") + "/"
pygments_dark_style = "github-dark"  # furo's own underlines modules, as if they were links
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# --- reference --------------------------------------------------------------------------------------------------------

napoleon_google_docstring = True
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

# Our own names must resolve. Those of other libraries cannot: their indexes are on the network, and the build is not.
nitpicky = True
# Nor do the files that hold the public names: the reference lists the packages and folders that one imports from.
_INTERNAL = "Adapter Block Compared Documents Fact FlattenFunctions StoredAdapter Switch Tiles TokenCount Yardstick"
_INTERNAL += " VersionDependentError"
nitpick_ignore_regex = [
    ("py:.*", r"(?!yobx_flatten\b|roundpipe_runtime\b).*"),
    ("py:mod", r"yobx_flatten\..*"),
    ("py:class", r"(yobx_flatten|roundpipe_runtime)(\.\w+)+\.[A-Z]"),  # type variables
    # internal classes, by name only: their files may be merged
    ("py:class", rf"yobx_flatten(\.\w+)+\.({_INTERNAL.replace(' ', '|')})"),
    ("py:class", r"roundpipe_runtime(\.\w+)+\.(BackwardTerm|CutPlan|FolderTokenizer|LossValue|ModelReading|TableRule)"),
]

# --- gallery ----------------------------------------------------------------------------------------------------------

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 5,
    "remove_config_comments": True,
}

# An example must run as quietly as a user's program does on the first try; progress bars would fill the page.
os.environ.setdefault("TQDM_DISABLE", "1")
# A dependency of the theme (a11y_pygments) sets the root logger to INFO when it is imported; every library
# would log its steps to the terminal. The first call that configures the root logger decides.
logging.basicConfig(level=logging.WARNING)
# matplotlib has no window here, which is what is wanted.
warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown", category=UserWarning)
# torch 2.13 copies its own `TreeSpec` through the deprecated `LeafSpec`, and states at the first conversion to ONNX
# which operators of torchvision it leaves out, if that is not there. Both would be on the page, with the path to torch.
warnings.filterwarnings("ignore", message=r".isinstance\(treespec, LeafSpec\). is deprecated", category=FutureWarning)
logging.getLogger("torch.onnx._internal.exporter._registration").addFilter(
    lambda record: "torchvision" not in str(record.msg)
)

# --- generated pages --------------------------------------------------------------------------------------------------

write_tables(Path(__file__).parent / "tables")


def _copy_notebooks() -> None:
    """Put the notebooks among the pages: as `make notebooks` ran them, or without output where it did not."""
    root = Path(__file__).parents[1]
    folder = Path(__file__).parent / "notebooks"
    folder.mkdir(exist_ok=True)
    for source in sorted((root / "notebooks").glob("*.ipynb")):
        ran = root / "build" / "notebooks" / source.name
        text = (ran if ran.exists() and is_run_of(ran, source) else source).read_text(encoding="utf-8")
        path = folder / source.name
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # an untouched file is not built again
            path.write_text(text, encoding="utf-8")


def is_run_of(ran: Path, source: Path) -> bool:
    """Whether one notebook holds the cells of the other."""
    one, other = (json.loads(path.read_text(encoding="utf-8"))["cells"] for path in (ran, source))
    return ["".join(cell["source"]) for cell in one] == ["".join(cell["source"]) for cell in other]


_copy_notebooks()


# A reader who searches for a word finds the guide, and neither a table of hundreds of models nor how the code is built.
NOT_SEARCHED = r"(dev/|rows/|changelog$|(matrix|cut_matrix|trainings|runtimes|genai|operators)$)"
# The reference links to these sections. A label in the page itself would be shown on a code host.
LABELS = {
    ("guide/register_your_class", "### Arguments of `register_class_flattening`"): "arguments-of-register",
    ("guide/export", "### Options of `export_onnx`"): "options-of-export-onnx",
    ("guide/generate", "## Arguments of `generate`"): "arguments-of-generate",
    ("guide/generate", "## Arguments of `export_folder`"): "arguments-of-export-folder",
}
# On a code host a page links to the program of an example, on the site to what the program prints and draws.
EXAMPLE = re.compile(r"\]\(((?:\.\./)?)examples/(export|pipelines)/(plot_\w+)\.py\)")
# A table that a code host opens by a link stands below the link on the site.
TABLE = re.compile(r"\[([^]]+)\]\((?:\.\./)?tables/\w+\.md\)")


def setup(app):
    """Change what the site shows of a page: labels, links, tags, the sidebar; write redirects at the end."""

    def read_source(app, page, content):
        for (where, heading), label in LABELS.items():
            if where == page:
                assert f"\n{heading}\n" in content[0], f"{page} has no {heading}"
                content[0] = content[0].replace(f"\n{heading}\n", f"\n({label})=\n\n{heading}\n")
        content[0] = TABLE.sub(r"\1", content[0])
        content[0] = EXAMPLE.sub(r"](\1auto_examples/\2/\3.rst)", content[0])

    def add_tags(app, page, template, context, doctree):
        if app.config.html_baseurl:
            title = re.sub(r"<[^>]+>", "", context.get("title", project))
            tags = head_tags(app.config.html_baseurl, page, html.unescape(title), myst_html_meta["description"])
            context["metatags"] = context.get("metatags", "") + tags

    def show_the_branch_of_the_page(app, page, template, context, doctree):
        from furo.navigation import get_navigation_tree

        if "toctree" in context:  # the pages below an entry of the sidebar are listed while one of them is read
            shown = context["toctree"](collapse=True, titles_only=True, maxdepth=2, includehidden=True)
            context["furo_navigation_tree"] = get_navigation_tree(shown)

    def leave_out_of_the_search(app, doctree):
        found = app.env.metadata[app.env.docname]
        if re.match(NOT_SEARCHED, app.env.docname):
            found["nosearch"] = True
        if app.env.docname.startswith("rows/"):  # a summary page links to it
            found["orphan"] = True

    def redirect(app, error):
        if error is None and app.builder.name == "html":
            write_redirects(Path(app.outdir))

    app.connect("source-read", read_source)
    app.connect("html-page-context", add_tags)
    app.connect("html-page-context", show_the_branch_of_the_page, priority=900)
    app.connect("doctree-read", leave_out_of_the_search)
    app.connect("build-finished", redirect)
