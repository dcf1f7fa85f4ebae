# syntax=docker/dockerfile:1
# An image from the wheel in dist/ (`python -m build` makes it).
#
#   docker build -t lit-effattn .                                                                    # CPU
#   docker build -t lit-effattn:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .               # CUDA
#   docker run --rm --gpus all -v "$PWD:/work" -v lit-effattn:/state --user "$(id -u):$(id -g)" lit-effattn:cuda fit --config digits_linear
FROM python:3.12-slim-bookworm

# The compiler is for the CPU's kernels, and for Triton's launchers on CUDA.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" /tmp/*.whl \
    && rm /tmp/*.whl

# /state is for a volume that is kept: the key by which later commands know a run as one's own is there.
RUN useradd --create-home --uid 1000 user && mkdir --mode 1777 /state
USER 1000
ENV XDG_CACHE_HOME=/tmp/cache XDG_STATE_HOME=/state
WORKDIR /work
ENTRYPOINT ["lit-effattn"]
CMD ["--help"]
