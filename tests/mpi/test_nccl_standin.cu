#include <nccl.h>
#include "cuda.h"
#include "mpi_tests.h"
#include "tensor.h"
using namespace mpi_tests;
TEST_CASE("smoke") {
  ncclUniqueId id{};
  if (rank() == 0) ncclGetUniqueId(&id);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ncclComm_t comm;
  CHECK(ncclCommInitRank(&comm, ranks(), id, rank()) == ncclSuccess);
  pentatron::Stream s("s");
  pentatron::DeviceArray<float> a(1024, pentatron::Purpose::communication);
  pentatron::PinnedArray<float> h(1024);
  for (int i = 0; i < 1024; ++i) h[i] = i + rank();
  CUDA_CHECK(cudaMemcpyAsync(a.data(), h.data(), 4096, cudaMemcpyHostToDevice, s));
  for (int b = 0; b < 5; b++) {
    auto t = std::chrono::steady_clock::now();
    std::vector<double> ts;
    for (int i = 0; i < 200; ++i) {
      auto t = std::chrono::steady_clock::now();
      CHECK(ncclAllReduce(a.data(), a.data(), 1024, ncclFloat, ncclMax, comm, s) == ncclSuccess);
      s.synchronize();
      ts.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t).count());
    }
    std::sort(ts.begin(), ts.end());
    if (!rank()) printf("median %g ms mean %g\n", ts[100], std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t).count() / 200);
  }
  CUDA_CHECK(cudaMemcpyAsync(h.data(), a.data(), 4096, cudaMemcpyDeviceToHost, s));
  s.synchronize();
  for (int i = 0; i < 1024; ++i) CHECK(h[i] == i + ranks() - 1);
  CHECK(ncclCommDestroy(comm) == ncclSuccess);
}
