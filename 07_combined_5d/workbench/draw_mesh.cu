// The picture of --show-mesh: a row for each rank, with its coordinates and its groups.
#include <iomanip>
#include <iostream>
#include <sstream>

#include "../mesh.h"

namespace pentatron {

// All but MeshGroup::all. The last one has a column if there are several copies.
constexpr std::array<const char*, 7> group_names = {"tensor",  "context",          "pipeline", "gradients",
                                                    "experts", "expert gradients", "replicate"};

std::string draw_mesh(const MeshShape& shape) {
  const size_t groups = group_names.size() - (shape.shard_ranks == 0);
  std::ostringstream text;
  text << "tp " << shape.tp << " x cp " << shape.cp << " x dp " << shape.dp << " x pp " << shape.pp << " = "
       << shape.ranks() << " ranks, ep " << shape.ep
       << "\ngradients: data x context; gradient norm and loss: all ranks\n\nrank  tp cp dp pp";
  for (size_t group = 0; group < groups; ++group)
    text << "  " << std::setw(16) << std::left << group_names[group];
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    const MeshCoordinates at = coordinates_of(shape, rank);
    text << std::right << "\n" << std::setw(4) << rank << "  ";
    for (const int coordinate : {at.tp, at.cp, at.dp, at.pp}) text << std::setw(2) << coordinate << " ";
    for (size_t group = 0; group < groups; ++group) {
      std::string members;
      for (const int member : members_of(shape, static_cast<MeshGroup>(group), rank))
        members += std::to_string(member) + " ";
      text << " " << std::setw(16) << std::left << members << " ";
    }
  }
  return text.str() + "\n";
}

void show_mesh(const MeshShape& shape) { std::cout << draw_mesh(shape); }

}  // namespace pentatron
