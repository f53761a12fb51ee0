"""Who asks, and whether they may."""

import logging
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from formats.errors import KVError
from kvtool.service.errors import Refused
from kvtool.service.partition import Partition
from kvtool.service.state import State
from kvtool.service.tenants import Tenant

logger = logging.getLogger(__name__)

_bearer = HTTPBearer(auto_error=False, description="A token of `kvtool tenants add`.")


def state_of(request: Request) -> State:
    """What this service was started with."""
    state: State = request.app.state.kvtool
    return state


def known(state: State, header: str) -> Tenant:
    """The tenant whose token an Authorization header carries.

    Raises:
        Refused: 401; 503 where the file of tenants cannot be read: then nobody is let in.
    """
    scheme, _, token = header.partition(" ")
    try:
        tenant = state.anyone if state.tenants is None else state.tenants.of(token) if scheme.lower() == "bearer" and token else None
    except (KVError, OSError) as error:
        logger.error("nobody is let in: %s", error)
        raise Refused(503, "who may use this service cannot be read", hint="its log says why", headers={"Retry-After": "5"}) from None
    if tenant is None:
        raise Refused(
            401,
            "a known bearer token is needed",
            hint="send Authorization: Bearer TOKEN",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
    return tenant


def tenant_of(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Tenant:
    """The tenant whose token was found before anything else was read."""
    tenant: Tenant = request.scope["state"]["known"]
    request.state.tenant = tenant.name
    return tenant


Known = Annotated[Tenant, Depends(tenant_of)]
Its = Annotated[State, Depends(state_of)]


def _with(right: str, tenant: Tenant) -> None:
    if right not in tenant.rights:
        # Another tenant has other objects, but the same figures of the service.
        other = "kvtool tenants add NAME --file FILE --may operate makes a token that may"
        hint = other if right == "operate" else f"it may {' and '.join(tenant.rights)}"
        raise Refused(403, f"this token may not {right}", hint=hint)


def reading(tenant: Known, state: Its) -> Partition:
    """The objects of a tenant who may read."""
    _with("read", tenant)
    return state.partition(tenant)


def writing(tenant: Known, state: Its) -> Partition:
    """The objects of a tenant who may write."""
    _with("write", tenant)
    return state.partition(tenant)


def operating(tenant: Known) -> Tenant:
    """A tenant who may see figures of the whole service."""
    _with("operate", tenant)
    return tenant


Reads = Annotated[Partition, Depends(reading)]
Writes = Annotated[Partition, Depends(writing)]
Operates = Annotated[Tenant, Depends(operating)]
