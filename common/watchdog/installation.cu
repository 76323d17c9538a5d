// What has to be true of a machine before several ranks can work there: an mpirun that belongs to the MPI of
// the program, and versions of CUDA and NCCL in which communicators do not deadlock.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "device/cuda.h"
#include "device/mapped_file.h"
#include "ranks/comm.h"

namespace pentatron {

// Where mpirun belongs to another MPI than the library, each process is rank 0 of 1. Ends such a process, and
// the first one says why: otherwise all of them would train, on the same GPU and into the same files.
void require_all_ranks(int ranks) {
  // How MPICH's mpirun, Open MPI's and Slurm tell a process how many they started, and which it is.
  constexpr const char* words[][2] = {{"PMI_SIZE", "PMI_RANK"},
                                      {"MPI_LOCALNRANKS", "MPI_LOCALRANKID"},
                                      {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                      {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
  for (const auto& [size, number] : words) {
    const char *const started = std::getenv(size), *const which = std::getenv(number);
    if (ranks > 1 || started == nullptr || std::atoi(started) <= 1) continue;
    if (which == nullptr || std::atoi(which) == 0)
      std::fprintf(
          stderr,
          "mpirun: %s processes were started, and each is alone; expected the mpirun of MPICH, which "
          "the program is linked with, or srun --mpi=pmi2 (common/cluster.md, \"Another mpirun\")\n",
          started);
    std::_Exit(exit_bad_usage);
  }
}

// A library works as the CUDA does that it was built with, also with a later driver. It has the line that it
// prints with NCCL_DEBUG=VERSION: "NCCL version 2.28.9+cuda13.0".
int cuda_of_nccl(const std::string& library) {
  if (!std::ifstream(library)) return 0;
  const MappedFile file("NCCL", library);
  const std::string_view text = file.text();
  for (size_t at = 0; (at = text.find("NCCL version ", at)) != text.npos; ++at) {
    int major = 0, minor = 0;
    const std::string line(text.substr(at, 64));
    if (std::sscanf(line.c_str(), "NCCL version %*d.%*d.%*d+cuda%d.%d", &major, &minor) == 2)
      return 1000 * major + 10 * minor;
  }
  return 0;
}

// Several communicators may be in use together only if their operations start in the order in which the
// host issued them (NCCL's and CUDA's documentation of NCCL_LAUNCH_ORDER_IMPLICIT). Otherwise
// sends and receives between two ranks deadlock. That needs CUDA 12.3: here, in the driver, and where NCCL
// was built.
void check_versions() {
#ifndef NCCL_OVER_MPI
  int nccl = 0, driver = 0;
  NCCL_CHECK(ncclGetVersion(&nccl));
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  if (nccl < NCCL_VERSION(2, 26, 0)) fail("NCCL", "version 2.26 or later is needed", __FILE__, __LINE__);
  if (std::min(driver, CUDART_VERSION) < 12030)
    fail("CUDA", "a toolkit and a driver for CUDA 12.3 or later are needed", __FILE__, __LINE__);
  Dl_info library;
  if (dladdr(reinterpret_cast<const void*>(ncclGetVersion), &library) == 0) return;
  const int built_with = cuda_of_nccl(library.dli_fname);
  if (built_with > 0 && built_with < 12030)
    fail("NCCL", "a library that was built with CUDA 12.3 or later is needed", __FILE__, __LINE__);
#endif
}

}  // namespace pentatron
