# An image of the programs: docker build -t burst . && docker run burst train --steps=20
#
# With CUDA's libraries, for GPUs:
#   docker build -t burst --build-arg CONFIG=cuda --build-arg BUILD=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#     --build-arg RUN=nvidia/cuda:13.0.1-runtime-ubuntu24.04 . && docker run --gpus=all burst train
ARG BUILD=debian:12
ARG RUN=debian:12-slim

FROM ${BUILD} AS build
ARG CONFIG=cpu
COPY . /src
RUN cd /src && third_party/install.sh \
 && bazel build --config=archive --config=${CONFIG} //train:archive \
 && mkdir /opt/burst \
 && tar -C /opt/burst --strip-components=1 -xf bazel-bin/train/burst-linux-x86_64.tar.xz

FROM ${RUN}
COPY --from=build /opt/burst /opt/burst
ENV PATH=/opt/burst/bin:${PATH}
WORKDIR /work
