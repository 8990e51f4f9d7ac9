"""Tags of pages that need the public address of the site: `[project.urls]` of pyproject.toml is where it is set."""

from __future__ import annotations

import html

PICTURE = "_static/social.png"


def head_tags(address: str, page: str, title: str, description: str) -> str:
    """Return what a page has in its head, once the site has an address.

    Args:
        address: the address of the site, with a slash at its end.
        page: name of the page, without an ending.
        title: its title, as text.
        description: a sentence about the site.
    """
    if page == "404":  # is shown for addresses of any depth
        return f'<base href="{html.escape(address)}">'
    tags = {
        "og:type": "website",
        "og:title": title,
        "og:description": description,
        "og:url": f"{address}{page}.html",
        "og:image": f"{address}{PICTURE}",
        "twitter:card": "summary_large_image",
    }
    return "".join(f'<meta property="{name}" content="{html.escape(text)}">' for name, text in tags.items())
