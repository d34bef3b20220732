# One image for all processes; the compose file and the Procfile say which one runs.
# No index is named here: --build-arg PIP_INDEX_URL=… for a mirror, TORCH_INDEX_URL=… for torch's CPU builds.
# With vLLM: EXTRAS=monitor,vllm, and PACKAGES="gcc libc6-dev", with which it builds kernel launchers as it starts.

FROM python:3.11-slim-bookworm AS build
ARG PIP_INDEX_URL=""
ARG TORCH_INDEX_URL=""
ENV PATH=/opt/marlaas/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/marlaas
WORKDIR /src
COPY constraints.txt ./
# The largest wheel in a layer of its own. Its dependencies come with the rest, from the usual index.
RUN pip install --no-deps --constraint constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY vendor/pycosat vendor/pycosat
RUN pip install ./vendor/pycosat
COPY pyproject.toml ./
COPY app app
COPY workers workers
COPY migrations migrations
ARG EXTRAS=monitor
RUN pip install --constraint constraints.txt ".[$EXTRAS]"

FROM python:3.11-slim-bookworm
ARG PACKAGES=""
RUN if [ -n "$PACKAGES" ]; then apt-get update && apt-get install --yes --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin marlaas \
    && install --directory --owner=marlaas --group=marlaas /models /cache
COPY --from=build /opt/marlaas /opt/marlaas
ENV PATH=/opt/marlaas/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    MARLAAS_MODELS_DIR=/models \
    MARLAAS_CACHE_DIR=/cache
USER 10001:10001
WORKDIR /tmp
CMD ["marlaas", "--help"]
