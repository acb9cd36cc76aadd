"""What a client is made of, for tests that look inside: the one place that reaches past its public face."""

from __future__ import annotations

from kvstore import Client
from kvstore.client.attachment import Attachment


def parts_of(client: Client) -> Attachment:
    """Return the attachment of `client`: its connections (`store`), arena, copier, stage and presence.

    Args:
        client: A client, open or closed.
    """
    return client._attached
