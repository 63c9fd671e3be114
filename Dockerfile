# The pinned environment. torch's wheels bring CUDA, so the base needs only Python, its headers and
# a compiler; the host brings the driver and the NVIDIA container toolkit. README says how to use it.
FROM python:3.11.13-slim-bookworm

# Inductor compiles with g++, Triton with the gcc below it; the base has Python.h
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*

# Whoever `docker run --user` names may write here and below: the folders are open, as /tmp is. The
# variable USER is for torch, which asks for a name even where the number has none.
RUN useradd --uid 1000 --no-create-home --home-dir /cache runner \
    && install -d -m 1777 /cache
ENV HOME=/cache USER=runner \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The stamp is run.sh's: with it, run.sh takes this .venv as it is
WORKDIR /speedrun
COPY requirements.txt ./
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir -r requirements.txt \
    && sha256sum requirements.txt >.venv/stamp \
    && sed -i 's/^/3.11 /; s/ *requirements.txt$//' .venv/stamp

COPY . ./
RUN install -d -m 1777 . records data/fineweb10B
USER 1000:1000
VOLUME ["/speedrun/data/fineweb10B", "/speedrun/records", "/cache"]
CMD ["./run.sh"]
