# A Linux with everything that `make` needs and the environment already made; no GPU is used.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home reader

USER reader
RUN mkdir /home/reader/flash-tutorial
WORKDIR /home/reader/flash-tutorial

# The environment lies outside the working tree, so that a dev container, which mounts its own tree, finds it too.
ENV VENV=/home/reader/venv
ARG PIP_ARGS="--no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu"
COPY --chown=reader Makefile requirements.txt ./
COPY --chown=reader tools tools
RUN make setup PIP_ARGS="$PIP_ARGS"

COPY --chown=reader . .
RUN make build

CMD ["make", "demo"]
